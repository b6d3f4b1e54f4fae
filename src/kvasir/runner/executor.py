"""What a Runner asks of the machine. An `Executor` computes steps over the rows of one runner. A `Handle` stands for
one step under way: its results stay where the executor computed them until they are asked for.

    runner      rows, plans, results, refusals, errors         decides what is computed
    executor    weights, cache, buffers, sampling              computes it

An executor writes the ids it samples where its next step reads them; the runner learns of them from the handle. The
capacity bounds the sizes of a step, so inputs can lie in buffers at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvasir.plan import Bytes, Decodes, Join, StepPlan, Work
from kvasir.runner.rows import Row, Rows

Entry = tuple[int, float, int, tuple[tuple[int, float], ...]]  # as in plan.RowResult


class Taken(NamedTuple):
    """What was sampled for a work. tokens: none with an error, several after an accepted draft. carry: that of the
    sampler at the last of them."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Entry, ...] = ()
    carry: bytes = b""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """What an executor is to do: what the plan says of blocks, then its `decodes`, whose token rows are the first ones,
    and `works`, those of the plan whose rows are sound. Without `columns` the plan has no decodes.

    starts: the first token row of each work,
    and after the last the number of token rows. now: places of the works that
    are sampled with the forward. later: of those that wait for a mask, whose logits are kept.
    """

    plan: StepPlan
    works: Sequence[Work]
    starts: Sequence[int]
    now: Sequence[int]
    later: Sequence[int]

    @property
    def decodes(self) -> Decodes:
        return self.plan.decodes


class Handle(Protocol):
    """A step under way. After `wait`, and before the executor's next step, the others give what it computed, and for as
    long as the handle lives where the executor queues steps; `at` is a work's place in the step."""

    def wait(self) -> float:
        """Returns at the end of the step, with the seconds that its kernels took if the executor counts them. Raises
        what the step raised."""
        ...

    def decoded(self) -> tuple[np.ndarray, Mapping[int, str]]:
        """For `Step.decodes`, the ids that were sampled, int32, and by place why there is none. Called once, and only
        where there are such rows."""
        ...

    def taken(self) -> Sequence[Taken]:
        """For the works of `Step.now`, in their order."""
        ...

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> Sequence[Taken]:
        """Samples works with masks, those of `Step.now` too. Called once, before `read`."""
        ...

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        """The log-probabilities of the work's `read`, or why there are none."""
        ...

    def pooled(self, at: int) -> bytes:
        """Float32 bytes of the work's pooled hidden state."""
        ...

    def hidden(self, at: int, name: str) -> bytes:
        """Float32 bytes of the work's rows of an output."""
        ...

    def saved(self) -> tuple[Bytes, ...]:
        """What the plan's `saves` give."""
        ...


class Executor(Protocol):
    """Computes steps. One step at a time: the next is started after the last was waited for, unless the executor queues
    them. It then computes them in the order of their starts, and each of them over rows as its plan and those before it
    have them, so it keeps rows of its own that follow the plans: `Rows.apply`, and `Row.take` of what it has sampled.
    The host learns of the ids from the handle and gives none back.

    computes: what it has code for of what not every executor has: inputs.FEATURES, "encodes" of a plan, "drafted" and
    "pending" of a work. The runner refuses the others by name. columns: it takes `Step.decodes` now. hidden: names of
    the outputs that work may want. cache: what tiers and tests may know of its memory.
    """

    @property
    def computes(self) -> frozenset[str]: ...

    @property
    def columns(self) -> bool: ...

    @property
    def hidden(self) -> frozenset[str]: ...

    @property
    def cache(self) -> Any: ...

    @property
    def overlaps(self) -> bool:
        """`start` returns while the step computes elsewhere."""
        ...

    @property
    def queues(self) -> bool:
        """`start` may be called while steps before it run: their ids and carries are fed to the new one where they were
        sampled. Not after a step of which works wait for a mask. Such an executor takes no columns."""
        ...

    def bind(self, rows: Rows) -> None:
        """The rows over which it computes; called once."""
        ...

    def enter(self, join: Join, row: Row) -> None:
        """A sequence has joined. Raises ValueError for a spec that it cannot sample by."""
        ...

    def settle(self) -> None:
        """Waits for a step whose result no one took; drops what went wrong in it."""
        ...

    def start(self, step: Step) -> Handle: ...

    def set_adapter(self, adapter: int, pairs: Any) -> None:
        """See kvasir.program.program.Program.set_adapter."""
        ...

    def close(self) -> None:
        """Waits for a step in progress and ends the threads. Twice does no harm."""
        ...
