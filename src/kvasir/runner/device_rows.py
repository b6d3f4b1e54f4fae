"""The rows of a runner on the device: ids, block tables and adapters that follow the plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvasir.graph.forward import StepBuffers
from kvasir.plan import Adapted, StepPlan
from kvasir.runner.rows import Rows

_CHUNK = 4096  # values that are written at a time


class Writer:
    """Writes scattered int32 values to tensors on a device, through buffers of a fixed size."""

    def __init__(self, device: torch.device):
        self._device = device
        self._at = torch.zeros(_CHUNK, dtype=torch.int64, device=device)
        self._values = torch.zeros(_CHUNK, dtype=torch.int32, device=device)

    def write(self, target: Tensor, at: np.ndarray, values: np.ndarray) -> None:
        """target.flatten()[at] = values. at: int64, without duplicates."""
        for first in range(0, len(at), _CHUNK):
            count = min(_CHUNK, len(at) - first)
            self._copy(self._values[:count], values[first : first + count])
            target.view(-1).index_copy_(0, self._places(at[first : first + count]), self._values[:count])

    def move(
        self, target: Tensor, at: np.ndarray, source: Tensor, source_at: np.ndarray, table: Tensor | None = None
    ) -> None:
        """target.flatten()[at] = source.flatten()[source_at], or what these number in `table`. at, source_at: int64,
        at most 4096, `at` without duplicates."""
        values = source.view(-1).index_select(0, self._places(source_at))
        if table is not None:
            values = table.index_select(0, values)
        target.view(-1).index_copy_(0, self._places(at), values)

    def rows(self, source: Tensor, at: Sequence[int] | np.ndarray) -> Tensor:
        """A copy of at most 4096 rows of a tensor. Indexing with a list would wait for the device."""
        return source.index_select(0, self._places(np.array(at, np.int64)))

    def add(self, target: Tensor, at: Sequence[int] | np.ndarray, rows: Tensor) -> None:
        """target[at] += rows. at: at most 4096, without duplicates."""
        target.index_add_(0, self._places(np.array(at, np.int64)), rows)

    def _places(self, at: np.ndarray) -> Tensor:
        """On the device, until the next call."""
        self._copy(self._at[: len(at)], at)
        return self._at[: len(at)]

    def fill(self, target: Tensor, values: np.ndarray) -> None:
        """Replaces a contiguous tensor."""
        self._copy(target, values)

    def _copy(self, target: Tensor, values: np.ndarray) -> None:
        source = torch.from_numpy(np.ascontiguousarray(values))
        if self._device.type == "cpu":
            target.copy_(source)
        else:
            target.copy_(source.pin_memory(), non_blocking=True)


class DeviceRows:
    """Keeps a copy of the runner's rows on the device. host: rows of its own, which follow the same plans; sampled ids
    reach them later, through `take`."""

    def __init__(self, host: Rows, step: StepBuffers):
        self.host, self.step = host, step
        self.writer = Writer(step.ids.device)
        self._adapters = np.zeros(tuple(step.adapters.shape), np.int32)  # as the device has them

    def follow(self, plan: StepPlan) -> None:
        """Applies a plan to both. A joined row replaces whatever occupied its place: the plan that left it may have
        been refused."""
        known = {work.row: self.host[work.row].known for work in plan.work if work.appended}
        self.host.apply(replace(plan, left=(*plan.left, *(join.row for join in plan.joined))))
        joined = {join.row for join in plan.joined}
        spans = [(row, 0, self.host[row].known) for row in joined]
        spans += [(row, known[row], self.host[row].known) for row in known if row not in joined]
        self._write_ids(spans)
        self._write_tables(plan, joined)
        self._write_adapters(joined)

    def adapters(self, row: int, end: int) -> set[int]:
        """The adapters that the device has for a row and that are in effect at one of the positions before `end`."""
        return {adapter for adapter, start, _ in self._adapters[row].tolist() if adapter and start < end}

    def write_ids(self, row: int, first: int, end: int) -> None:
        """Copies ids [first, end) of a row to the device."""
        self._write_ids([(row, first, end)])

    def _write_ids(self, spans: Iterable[tuple[int, int, int]]) -> None:
        ids, width = self.host.arrays.ids, self.step.ids.shape[1]
        found = [(row * width + np.arange(first, end), ids[row, first:end]) for row, first, end in spans if end > first]
        if found:
            self.writer.write(self.step.ids, *(np.concatenate(part) for part in zip(*found, strict=True)))

    def _write_tables(self, plan: StepPlan, joined: set[int]) -> None:
        for group, (target, source) in enumerate(zip(self.step.tables, self.host.arrays.tables, strict=True)):
            width = target.shape[1]
            spans = [
                (work.row, work.blocks[group][0], work.blocks[group][0] + len(work.blocks[group][1]))
                for work in plan.work
                if group < len(work.blocks) and work.blocks[group][1]
            ]
            # The blocks of a row's previous sequence are cleared: padding and stale entries stay within the pool.
            cleared = [(row, 0, width) for row in joined]
            kept = [span for span in spans if span[0] not in joined]
            found = [(row * width + np.arange(a, b), source[row, a:b]) for row, a, b in (*cleared, *kept)]
            if found:
                self.writer.write(target, *(np.concatenate(part) for part in zip(*found, strict=True)))

    def _write_adapters(self, joined: set[int]) -> None:
        """An adapter that is not loaded counts as none: the runner computes nothing of its rows."""
        wanted = {row: self._fields(self.host[row].adapters) for row in joined}
        if changed := [row for row in wanted if not np.array_equal(wanted[row], self._adapters[row])]:
            rows, size = np.array(changed), self._adapters[0].size
            self._adapters[rows] = np.stack([wanted[row] for row in changed])
            at = (rows[:, None] * size + np.arange(size)).reshape(-1)
            self.writer.write(self.step.adapters, at, self._adapters[rows].reshape(-1))

    def _fields(self, adapters: Sequence[Adapted]) -> np.ndarray:
        """The fields of a row's adapters, as in ops/linear/triton_in_effect."""
        fields = np.zeros_like(self._adapters[0])
        loaded = [one for one in adapters if one.adapter in self.host.adapters]
        for at, (adapter, scale, start) in enumerate(loaded[: len(fields)]):
            fields[at] = adapter, start, np.float32(scale).view(np.int32)
        return fields
