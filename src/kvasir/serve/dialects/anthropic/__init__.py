"""The Messages API: bodies in wire.py, conversion to a chat in prompt.py, content blocks in blocks.py, routes in
messages.py and batches.py."""

from kvasir.serve.dialects.anthropic import batches, messages

ROUTERS = (batches.router, messages.router)
