"""The Messages API: bodies in wire.py, what they become in prompt.py, answers in blocks.py, routes in messages.py."""

from kvasir.serve.anthropic import messages

ROUTERS = (messages.router,)
