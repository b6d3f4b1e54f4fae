"""The interface between a Runner and its executor. An `Executor` computes steps over the rows of one runner. A `Handle`
stands for one pending step: its results stay where the executor computed them until they are read.

    runner      rows, plans, results, refusals, errors         decides what is computed
    executor    weights, cache, buffers, sampling              computes it

An executor writes the ids it samples where its next step reads them; the runner gets them from the handle. The
capacity bounds the sizes of a step, so inputs can lie in buffers at fixed addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvasir.lora import Adapter
from kvasir.plan import Bytes, Decodes, Join, StepPlan, Work
from kvasir.runner.rows import Row, Rows

Entry = tuple[int, float, int, tuple[tuple[int, float], ...]]  # as in plan.RowResult


class Taken(NamedTuple):
    """Sampled ids of a work. tokens: empty with an error, several after an accepted draft. carry: the sampler's, after
    the last token."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Entry, ...] = ()
    carry: bytes = b""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ExecutorStep:
    """A step for an executor: moves the plan's blocks, then computes the plan's `decodes`, whose token rows come first,
    and `works`: the plan's works whose rows are sound. Without `Executor.columns` the plan has no decodes.

    starts: the first token row of each work, then the total number of token rows. now: places of the works that are
    sampled with the forward. later: places of the works that are sampled by `Handle.take`: those that will have a mask,
    and those with a draft that may have one or whose sampler has a carry. A work with a draft is sampled after each of
    its last 1 + drafted token rows (`drafts.accepted`).
    """

    plan: StepPlan
    works: Sequence[Work]
    starts: Sequence[int]
    now: Sequence[int]
    later: Sequence[int]

    @property
    def decodes(self) -> Decodes:
        """The plan's decodes."""
        return self.plan.decodes


class Handle(Protocol):
    """A pending step. The other methods return its results after `wait` and until the executor's next step starts, or,
    if the executor queues steps, as long as the handle exists. at: a work's place in the step."""

    def wait(self) -> float:
        """Waits for the end of the step. Returns the seconds that its kernels took, 0 if the executor does not measure
        them. Raises what the step raised."""
        ...

    def decoded(self) -> tuple[np.ndarray, Mapping[int, str]]:
        """The ids sampled for `ExecutorStep.decodes`, int32, and the errors of failed rows by place. Called once, and
        only if the step has decodes."""
        ...

    def taken(self) -> Sequence[Taken]:
        """Sampled ids of the works of `ExecutorStep.now`, in their order."""
        ...

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        """Begins what `take` does, for works whose next ids the executor's next step reads where they are sampled. Only
        called if the executor queues steps, and once; `take` then has the same arguments. False if `take` must be
        called before the next step is started."""
        ...

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> Sequence[Taken]:
        """Samples works with their masks (None: no mask); works of `ExecutorStep.now` can be sampled again. Called
        once, before `read`."""
        ...

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        """The log-probabilities of the work's `read`, and an error if there are none."""
        ...

    def pooled(self, at: int) -> bytes:
        """Float32 bytes of the work's pooled hidden state."""
        ...

    def hidden(self, at: int, name: str) -> bytes:
        """Float32 bytes of the work's token rows of a named output."""
        ...

    def saved(self) -> tuple[Bytes, ...]:
        """The bytes of the plan's `saves`."""
        ...


class Executor(Protocol):
    """Computes steps one at a time: a step is started after the previous one was waited for, unless the executor queues
    steps. A queuing executor computes steps in the order of their starts, each over the rows as its plan and the
    earlier plans define them. So it keeps rows of its own that follow the plans: `Rows.apply`, and `Row.take` of the
    sampled ids. The host reads the ids from the handle and passes none back.

    computes: optional features that it implements: names of inputs.FEATURES, "encodes" of a plan, "drafted" and
    "pending" of a work. The runner refuses the others by name. columns: whether it currently takes
    `ExecutorStep.decodes`. hidden: names of the outputs that work may want. cache: its memory, as tiers and tests may
    see it. grows: see Capacity.grows; an executor that has any also has `watch`, see Runner.watch.
    """

    @property
    def computes(self) -> frozenset[str]: ...

    @property
    def columns(self) -> bool: ...

    @property
    def grows(self) -> tuple[int, ...]: ...

    @property
    def hidden(self) -> frozenset[str]: ...

    @property
    def cache(self) -> Any: ...

    @property
    def overlaps(self) -> bool:
        """Whether `start` returns while the step is computed in the background."""
        ...

    @property
    def queues(self) -> bool:
        """Whether `start` may be called while earlier steps run: the new step reads their ids and carries where they
        were sampled. Not allowed while works of a step wait for a mask. Such an executor takes no columns."""
        ...

    def bind(self, rows: Rows) -> None:
        """Sets the rows over which it computes; called once."""
        ...

    def enter(self, join: Join, row: Row) -> None:
        """A sequence has joined. Raises ValueError for a spec that the executor cannot sample with."""
        ...

    def settle(self) -> None:
        """Waits for a step whose result was not taken; ignores its errors."""
        ...

    def start(self, step: ExecutorStep) -> Handle: ...

    def check_adapter(self, adapter: Adapter) -> None:
        """Raises UnsupportedModel, which names what this executor cannot compute of an adapter. Any thread may call it
        at any time."""
        ...

    def pack_adapter(self, adapter: Adapter) -> Any:
        """The adapter in the executor's own form, with its size in memory as `nbytes`. As `check_adapter`."""
        ...

    def set_adapter(self, adapter: int, packed: Any) -> None:
        """Sets what rows with this adapter id get from now on, as `pack_adapter` made it; None removes the adapter. Not
        allowed during a step. Raises ValueError for an invalid id."""
        ...

    def close(self) -> None:
        """Waits for a step in progress and ends the threads. Idempotent."""
        ...
