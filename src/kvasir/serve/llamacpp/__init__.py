"""llama.cpp's own routes: bodies in wire.py, parameters in params.py, answers in completion.py, others in server.py."""

from kvasir.serve.llamacpp import completion, server

ROUTERS = (completion.router, server.router)
