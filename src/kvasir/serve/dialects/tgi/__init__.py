"""The native routes of Hugging Face's Text Generation Inference: bodies in wire.py, routes in generate.py, response
objects in shapes.py.

Specification: https://huggingface.github.io/text-generation-inference/
"""

from kvasir.serve.dialects.tgi import generate
from kvasir.serve.dialects.tgi.errors import speaks_tgi, tgi_error
from kvasir.serve.http.dialect import TEXT, Dialect, object_schema

DIALECT = Dialect(
    "tgi",
    (generate.router,),
    speaks_tgi,
    tgi_error,
    "TgiError",
    object_schema(error=TEXT, error_type=TEXT),
    statuses={400: 422, 500: 424},
)
