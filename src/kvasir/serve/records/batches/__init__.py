"""OpenAI's files and batches: many requests in a file, run when there is capacity, with results in another file."""

from kvasir.serve.records.batches.call import Caller
from kvasir.serve.records.batches.kept import Batches

__all__ = ["Batches", "Caller"]
