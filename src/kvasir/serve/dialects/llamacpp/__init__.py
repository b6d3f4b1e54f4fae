"""llama.cpp's native routes: bodies in wire.py, parameters in params.py, completions in completion.py, others in
server.py."""

from kvasir.serve.dialects.llamacpp import completion, server
from kvasir.serve.dialects.llamacpp.errors import is_llamacpp, llamacpp_error
from kvasir.serve.http.dialect import TEXT, TEXT_OR_NULL, Dialect, object_schema

DIALECT = Dialect(
    "llama.cpp",
    (completion.router, server.router),
    lambda scope: is_llamacpp(scope["path"]),
    llamacpp_error,
    "LlamaCppError",
    object_schema(error=object_schema(code={"type": "integer"}, message=TEXT, type=TEXT, param=TEXT_OR_NULL)),
)
