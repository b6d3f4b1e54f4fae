"""The native route of SGLang, /generate: bodies in wire.py, the route in generate.py, response objects in shapes.py.

Specification: https://docs.sglang.io/basic_usage/sampling_params.html
"""

from kvasir.serve.dialects.sglang import generate
from kvasir.serve.dialects.sglang.errors import sglang_error, speaks_sglang
from kvasir.serve.http.dialect import TEXT, Dialect, object_schema

DIALECT = Dialect(
    "sglang",
    (generate.router,),
    speaks_sglang,
    sglang_error,
    "SglangError",
    object_schema(error=object_schema(message=TEXT)),
)
