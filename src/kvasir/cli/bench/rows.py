"""What a benchmark measured: the figures of each run, and each figure over all runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.cli.bench.measure import Figures, Samples
from kvasir.cli.bench.probe import Probe


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The figures of one run, and times of its requests, with the machine's rates measured just before it and the share
    of the processors that other processes used during it."""

    figures: Figures
    probe: Probe
    foreign_cpu: float
    samples: Samples = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportRow:
    """A figure over all runs. `limit` is None for a figure without a limit."""

    name: str
    median: float
    min: float
    max: float
    limit: float | None

    @property
    def of_limit(self) -> float | None:
        """The share of the limit; 1 is optimal, for times and for rates. None without a limit, and above it: then the
        probe was disturbed, and what it found is none."""
        share = self._share
        return None if share is None or share > 1 else share

    @property
    def is_above(self) -> bool:
        """Whether the figure is better than its limit."""
        return (self._share or 0) > 1

    @property
    def _share(self) -> float | None:
        if not self.limit:
            return None
        return self.median / self.limit if self.name.endswith("_per_s") else self.limit / self.median
