"""The rows of the table of statistics (`kvasir.statistics`) about batches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvasir.metrics import Chart, counter, gauge

BATCHES = "Batches"  # the dashboard's row


@dataclass
class BatchStats:
    """Statistics of batches, whose lines run beside other requests."""

    batches: dict[str, int] = gauge(
        "batches_open",
        "Batches that run, and that wait for their turn.",
        Chart(BATCHES, "Batches"),
        start=dict,
        labels=("state",),
    )
    running: int = gauge(
        "batch_lines_running", "Lines of batches in progress.", Chart(BATCHES, "Lines of batches", "running")
    )
    places: int = gauge(
        "batch_lines_max", "Lines of batches that may be in progress.", Chart(BATCHES, "Lines of batches", "at most")
    )
    lines: Counter[str] = counter(
        "batch_lines",
        "Lines of batches, by outcome; `retried` counts attempts that found the server too busy.",
        Chart(BATCHES, "Lines of batches by outcome", unit="reqps"),
        start=lambda: Counter(completed=0, failed=0, retried=0),
        labels=("outcome",),
    )
