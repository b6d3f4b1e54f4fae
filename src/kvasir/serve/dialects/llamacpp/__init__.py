"""llama.cpp's native routes: bodies in wire.py, parameters in params.py, completions in completion.py, others in
server.py."""

from kvasir.serve.dialects.llamacpp import completion, server

ROUTERS = (completion.router, server.router)
