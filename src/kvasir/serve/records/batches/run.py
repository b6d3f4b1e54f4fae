"""BatchRun: a batch in progress.

validating -> in_progress -> finalizing -> completed, expired or cancelled; or failed, if no line could be run
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

Batch = dict[str, Any]  # as the API returns it

OPEN = ("validating", "in_progress", "finalizing", "cancelling")


class BatchRun:
    """end: the final status, once it is known. done: indices of the completed lines. begun: whether it is among the
    running batches of its key."""

    def __init__(self, owner: str, batch: Batch, end: str | None = None):
        self.owner = owner
        self.batch = batch
        self.end = end
        self.done: set[int] = set()
        self.begun = False
        self.writing = asyncio.Lock()
        self.task: asyncio.Task[None] | None = None
        self.lines: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.batch["id"]

    def enter(self, status: str) -> None:
        self.batch["status"] = status
        self.batch[f"{status}_at"] = int(time.time())

    def count(self, index: int, ok: bool) -> None:
        self.done.add(index)
        self.batch["request_counts"]["completed" if ok else "failed"] += 1
