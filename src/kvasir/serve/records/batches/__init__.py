"""OpenAI's files and batches: many requests in a file, run when there is capacity, with results in another file."""

from kvasir.serve.records.batches import files, routes
from kvasir.serve.records.batches.call import Caller
from kvasir.serve.records.batches.kept import Batches

ROUTERS = (files.router, routes.router)

__all__ = ["ROUTERS", "Batches", "Caller"]
