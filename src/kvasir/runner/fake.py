"""FakeRunner: a runner whose executor samples tokens that can be computed by hand, over a cache that detects every
mistake of a plan. No torch.

Each slot of its cache holds a number: the token id whose keys and values would lie there, or a hash that fake_content
makes of the id, embeddings, positions and adapters. A row's next token is

    (31 * sum of all numbers of the sequence + 7 * position + seed) mod vocab_size

where the numbers are read *through the block tables of the plan*, as attention would read keys and values: a block that
was never written, was given to another row, or was not copied causes a wrong token or an AssertionError. Only sequences
with a temperature get a carry.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np

from kvasir.caches import CacheKind, attention
from kvasir.errors import DeviceFault
from kvasir.inputs import FEATURES, Adapter
from kvasir.plan import BlockSink, Bytes, CacheGroup, Capacity, Decodes, Encoders, Join, StepPlan, Work
from kvasir.runner.blocks import move_blocks
from kvasir.runner.executor import Entry, ExecutorStep, Taken
from kvasir.runner.fake_adapters import FakeAdapters, FakePacked
from kvasir.runner.fake_content import PLAIN, FakeContent
from kvasir.runner.fake_guesses import FakeProposer
from kvasir.runner.rows import Row, Rows
from kvasir.runner.runner import Runner
from kvasir.types import ModelInfo, Task

EMPTY = -1


def fake_next(ids: list[int], position: int, seed: int, vocab_size: int) -> int:
    """The token that FakeRunner samples at `position` after `ids`. seed: of SamplingSpec."""
    return (31 * sum(ids) + 7 * position + seed % 1009) % vocab_size


class FakeRunner(Runner):
    """A runner whose executor has no model.

    step_seconds: duration of a step. fault: called with each plan before it runs; may raise. deadly_token: an id that
    kills the whole process when it is computed, as a faulty kernel would. device_fault_token: one that raises
    DeviceFault. overlaps: whether the next step may be planned while a step runs. window: of its only cache group, 0
    for none; or of each of several cache groups. kinds: the kind of each cache group, instead of windows. guesses: the
    share of its guesses (`Work.propose`) that are right; None: it does not guess. grows: whether blocks can be read
    while a step computes them.
    """

    samples: type[FakeExecutor]  # the executor's class

    def __init__(
        self,
        *,
        vocab_size: int = 256,
        num_blocks: int = 64,
        block_size: int = 16,
        max_rows: int = 8,
        max_tokens_per_step: int = 64,
        max_model_len: int = 512,
        window: int | tuple[int, ...] = 0,
        kinds: tuple[CacheKind, ...] = (),
        step_seconds: float = 0.0,
        deadly_token: int | None = None,
        device_fault_token: int | None = None,
        fault: Callable[[StepPlan], Any] | None = None,
        overlaps: bool = False,
        tasks: tuple[Task, ...] = (Task.GENERATE,),
        max_loras: int = 8,
        lora_memory: int = 1 << 30,
        max_drafted: int = 8,
        encoders: Encoders | None = Encoders(1 << 20, 64, 256),
        guesses: float | None = None,
        grows: bool = False,
    ):
        windows = window if isinstance(window, tuple) else (window,)
        kinds = kinds or tuple(attention(1, 1, window) for window in windows)
        groups = tuple(CacheGroup(kind, (g,), 8 * (block_size + kind.keeps_starts)) for g, kind in enumerate(kinds))
        sizes = (num_blocks,) * len(groups)
        capacity = Capacity(
            max_rows, max_tokens_per_step, max_model_len, block_size, groups, sizes, vocab_size, max_loras, max_drafted,
            encoders=encoders,
        )  # fmt: skip
        info = ModelInfo(
            "fake", "fake", tasks, vocab_size, max_model_len, executor="fake",
            max_adapters=max_loras, adapter_bytes=lora_memory,
        )  # fmt: skip
        executor = self.samples(capacity, step_seconds, deadly_token, device_fault_token, fault, overlaps)
        executor.grows = tuple(g for g, kind in enumerate(kinds) if grows and not (kind.fixed or kind.keeps_starts))
        proposer = None if guesses is None else FakeProposer(executor, guesses, max_model_len)
        super().__init__(executor, capacity, info, proposer, FakeAdapters())


class FakeCache:
    """A `BlockCache` of numbers in place of keys and values: int64 [groups, blocks, block size].

    starts: int64 [groups, blocks], the state at the start of each block, for kinds that keep it.
    """

    def __init__(self, capacity: Capacity):
        self.kinds = tuple(group.kind for group in capacity.groups)
        self.size = capacity.block_size
        self.starts = np.full((len(self.kinds), capacity.num_blocks[0]), EMPTY, np.int64)
        self.ids = np.full((*self.starts.shape, self.size), EMPTY, np.int64)

    def write(self, group: int, table: np.ndarray, first: int, numbers: np.ndarray) -> None:
        """Writes numbers at the positions from `first` on."""
        positions = np.arange(first, first + len(numbers))
        blocks = table[positions // self.size]
        assert blocks.all(), "a write into the scratch block"
        self.ids[group, blocks, positions % self.size] = numbers

    def read(self, group: int, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.ids[group, table[positions // self.size], positions % self.size]

    def open_blocks(self, group: int, table: np.ndarray, ids: np.ndarray, first: int, end: int) -> None:
        """Stores the states at the starts of the blocks that begin in positions [first, end)."""
        for index in range(-(-first // self.size), -(-end // self.size)):
            self.starts[group, table[index]] = fake_state(ids[: index * self.size])

    def copy(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = map(list, zip(*pairs, strict=True))
        self.ids[group, targets] = self.ids[group, sources]
        self.starts[group, targets] = self.starts[group, sources]

    def export(self, group: int, block: int) -> memoryview:
        start = self.starts[group, block].tobytes() if self.kinds[group].keeps_starts else b""
        return memoryview(self.ids[group, block].tobytes() + start)

    def import_(self, group: int, block: int, data: Bytes) -> None:
        numbers = np.frombuffer(data, np.int64)
        self.ids[group, block], self.starts[group, block] = numbers[: self.size], numbers[-1]


class FakeExecutor:
    """Computes every feature of a plan. Takes columns if all numbers are plain ids and no cache group has a window,
    states or a fixed size. draws_columns: False where `draw` is replaced, so that columns are never taken."""

    computes = frozenset((*FEATURES, "encodes", "drafted", "pending"))
    queues = False
    draws_columns = True

    def __init__(
        self,
        capacity: Capacity,
        step_seconds: float = 0.0,
        deadly_token: int | None = None,
        device_fault_token: int | None = None,
        fault: Callable[[StepPlan], Any] | None = None,
        overlaps: bool = False,
    ):
        self.capacity, self.overlaps = capacity, overlaps
        self.step_seconds, self.fault = step_seconds, fault
        self.deadly_token, self.device_fault_token = deadly_token, device_fault_token
        self.hidden: frozenset[str] = _AllNames()
        self.cache = FakeCache(capacity)
        self.arrived: set[int] = set()  # transfers of a connector that are done
        self.contents: dict[int, FakeContent] = {}  # by row, for sequences with inputs or adapters
        self.adapters: dict[int, FakePacked] = {}  # by id
        self.used: dict[int, dict[int, FakePacked]] = {}  # by row: its adapters when it joined, by id
        self.outputs: dict[bytes, tuple[bytes, int]] = {}  # by content: a hash of the encoded data, embeddings
        self.closed = False
        self.grows: tuple[int, ...] = ()
        self.sink: BlockSink | None = None

    def watch(self, sink: BlockSink) -> None:
        self.sink = sink

    def _grow(self, step: int, works: Sequence[Work]) -> None:
        """Hands out the blocks of `Work.grows` in two pieces."""
        for group, block in (block for work in works for block in work.grows):
            assert self.sink, "there is no one to take blocks"
            data = self.cache.export(group, block)
            half = len(data) // 2
            self.sink(step, group, block, 0, data[:half])
            self.sink(step, group, block, half, data[half:])
            self.sink(step, group, block, 0, None)

    @property
    def columns(self) -> bool:
        usual = (not (kind.fixed or kind.keeps_starts or kind.reach) for kind in self.cache.kinds)
        return self.draws_columns and not self.contents and all(usual)

    def bind(self, rows: Rows) -> None:
        self.rows = rows

    def enter(self, join: Join, row: Row) -> None:
        self.contents.pop(join.row, None)
        self.used[join.row] = {a.adapter: self.adapters[a.adapter] for a in join.adapters if a.adapter in self.adapters}
        if join.inputs or join.adapters:
            contents = {id: packed.content for id, packed in self.used[join.row].items()}
            adapters = [Adapter("", a.scale, a.start, contents.get(a.adapter, "")) for a in join.adapters]
            self.contents[join.row] = FakeContent(join.inputs, adapters, self.capacity.max_model_len + 1)
        if sampled := row.ids[join.prompt_len : row.known].tolist():
            # A handmade request may resume ids of an earlier engine without their carry.
            carries = (fake_carry(b"", sampled[i:]) for i in range(len(sampled)))
            assert not join.carry or join.carry in carries, "the carry is not that of the sampled tokens"

    def settle(self) -> None:
        assert not self.closed, "a step of a closed runner"

    def check_adapter(self, adapter: Any) -> None: ...

    def pack_adapter(self, adapter: Any) -> Any: ...

    def set_adapter(self, adapter: int, packed: FakePacked | None) -> None:
        if not 1 <= adapter <= self.capacity.adapters:
            raise ValueError(f"adapter ids are 1 to {self.capacity.adapters}, not {adapter}")
        self.adapters.pop(adapter, None)
        if packed is not None:
            self.adapters[adapter] = packed

    def start(self, step: ExecutorStep) -> FakeHandle:
        if self.fault:
            self.fault(step.plan)
        self._encode(step.plan)
        saved = move_blocks(self.cache, step.plan)
        if step.decodes:
            self._write_all(step.decodes)
        for work in step.works:
            self._write(work)
        self._grow(step.plan.step, step.works)
        return FakeHandle(self, step, saved)

    def close(self) -> None:
        self.closed = True

    def _encode(self, plan: StepPlan) -> None:
        for content in plan.dropped:
            self.outputs.pop(content, None)
        for job in plan.encodes:
            self.outputs[job.content] = sha256(job.data).digest(), job.length
        if limits := self.capacity.encoders:
            held = limits.bytes_each * sum(length for _, length in self.outputs.values())
            assert held <= limits.max_bytes, "outputs exceed their capacity"
            assert sum(job.length for job in plan.encodes) <= limits.per_step, "a step encodes more than its limit"

    def _write(self, work: Work) -> None:
        row, end = self.rows[work.row], work.start + work.count
        content = self.contents.get(work.row, PLAIN)
        for id, packed in self.used[work.row].items():
            assert self.adapters.get(id) is packed, "an adapter was replaced while a row used it"
        assert content.inside(work.start) == content.inside(end) == 0, "a bidirectional span was split"
        for name in content.reads(work.start, end):
            assert self.outputs.get(name, (b"", 0))[0] == name, "a step reads an output that was not encoded"
        numbers = content.numbers(row.ids[:end])
        assert set(work.pending) <= self.arrived, "the step reads blocks that have not arrived"
        assert not work.indivisible or (work.start == 0 and end == row.known), "an indivisible prompt was split"
        for group, (kind, table) in enumerate(zip(self.cache.kinds, row.tables, strict=True)):
            if not kind.fixed:
                self.cache.write(group, table, work.start, numbers[work.start :])
            elif not work.start:  # once, by the sequence's first step
                self.cache.write(group, table, 0, fake_encoded(content.scope, kind.fixed))
            if kind.keeps_starts:
                self.cache.open_blocks(group, table, numbers, work.start, end)
        self._meet(row.ids[work.start : end])

    def _write_all(self, decodes: Decodes) -> None:
        rows, starts = _columns(decodes)
        ids, size = self.rows.arrays.ids[rows, starts], self.cache.size
        for group, table in enumerate(self.rows.arrays.tables):
            blocks = table[rows, starts // size]
            assert blocks.all(), "a write into the scratch block"
            self.cache.ids[group, blocks, starts % size] = ids
        self._meet(ids)

    def _meet(self, ids: np.ndarray) -> None:
        """Dies, or fails as a device does, if one of the ids is made to."""
        if self.deadly_token is not None and self.deadly_token in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.device_fault_token is not None and self.device_fault_token in ids:
            raise DeviceFault("an illegal memory access was encountered")

    def draw_all(self, decodes: Decodes) -> tuple[np.ndarray, dict[int, str]]:
        """The same as `draw` without a mask for each row; also reads all ids of all rows through their tables."""
        rows, starts = _columns(decodes)
        size, arrays = self.cache.size, self.rows.arrays
        blocks = int(starts.max()) // size + 1
        known = np.arange(blocks * size) <= starts[:, None]
        own = np.zeros((len(rows), blocks * size), np.int64)
        there = arrays.ids[rows, : blocks * size]
        own[:, : there.shape[1]] = there
        for group, table in enumerate(arrays.tables):
            found = self.cache.ids[group, table[rows, :blocks]].reshape(own.shape)
            assert not ((found != own) & known).any(), "a row reads positions that it never wrote"
        sums = np.where(known, own, 0).sum(1)
        return ((31 * sums + 7 * (starts + 1)) % self.capacity.vocab_size).astype(np.int32), {}

    def seen(self, work: Work) -> list[int]:
        """All numbers of the sequence. Those that the last position attends to in each group are read from the cache
        and checked."""
        row, end = self.rows[work.row], work.start + work.count
        content = self.contents.get(work.row, PLAIN)
        numbers = content.numbers(row.ids[:end])
        expected = numbers.copy()
        for group, (kind, table) in enumerate(zip(self.cache.kinds, row.tables, strict=True)):
            positions = np.arange(kind.fixed) if kind.fixed else np.arange(kind.low(end - 1), end)
            found = self.cache.read(group, table, positions)
            if kind.fixed:
                assert (found == fake_encoded(content.scope, kind.fixed)).all(), "an output differs from its encoder's"
                continue
            assert (found == expected[positions]).all(), "a row reads positions that it never wrote"
            numbers[positions] = found
            if kind.keeps_starts:
                last = (end - 1) // self.cache.size
                assert self.cache.starts[group, table[last]] == fake_state(numbers[: last * self.cache.size]), "a state"
        return numbers.tolist()

    def draw(self, work: Work, mask: bytes | None) -> Taken:
        """Samples the next token, and along the draft as long as it matches and the masks allow any id."""
        row, end = self.rows[work.row], work.start + work.count
        seen, spec = self.seen(work), row.spec
        masks = [mask] * (work.drafted + 1)
        if mask and work.drafted:
            masks = [mask[i : i + len(mask) // len(masks)] for i in range(0, len(mask), len(mask) // len(masks))]
        tokens: list[int] = []
        for at, mask in zip(range(end - work.drafted, end + 1), masks, strict=True):
            if mask is not None and not any(mask):
                break
            token = self._next_id(row, seen[:at], mask)
            tokens.append(token)
            if at < end and row.ids[at] != token:
                break
        if not tokens:
            return Taken(error="no token is allowed")
        # Guided sequences get no carry: forced ids are not sampled, so a carry would miss them.
        carries = (spec.temperature or row.carry) and not spec.guided
        carry = fake_carry(row.carry, tokens) if carries else row.carry
        first = end - work.drafted
        entries = (fake_logprob(t, first + i, spec.logprobs) for i, t in enumerate(tokens) if spec.logprobs >= 0)
        return Taken(tuple(tokens), tuple(entries), carry)

    def next_id(self, row: Row, ids: np.ndarray, mask: bytes | None) -> int:
        """The id that is sampled after these ids of a row."""
        return self._next_id(row, self.contents.get(row.number, PLAIN).numbers(ids).tolist(), mask)

    def _next_id(self, row: Row, seen: list[int], mask: bytes | None) -> int:
        spec, vocab, at = row.spec, self.capacity.vocab_size, len(seen)
        ahead = self.contents.get(row.number, PLAIN).ahead
        token = fake_next(seen, at + ahead, spec.seed if spec.temperature else 0, vocab)
        if token in spec.stop_ids and at - row.prompt_len < spec.min_tokens:
            token = (token + 1) % vocab
        return fake_masked(token, mask, vocab)


FakeRunner.samples = FakeExecutor


class _AllNames(frozenset):
    """A set that contains every name: every output can be requested."""

    def issuperset(self, names: object) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class FakeHandle:
    """A pending step of a FakeExecutor."""

    executor: FakeExecutor
    step: ExecutorStep
    blocks: tuple[Any, ...]

    def wait(self) -> float:
        if self.executor.step_seconds:
            time.sleep(self.executor.step_seconds)
        for at in set(range(len(self.step.works))) - {*self.step.now, *self.step.later}:
            self.executor.seen(self.step.works[at])
        return 0.0

    def decoded(self) -> tuple[np.ndarray, Mapping[int, str]]:
        return self.executor.draw_all(self.step.decodes)

    def taken(self) -> list[Taken]:
        return [self.executor.draw(self.step.works[at], None) for at in self.step.now]

    def begin(self, at: Sequence[int], masks: Sequence[bytes | None]) -> bool:
        return False

    def take(self, at: Sequence[int], masks: Sequence[bytes | None]) -> list[Taken]:
        return [self.executor.draw(self.step.works[i], mask) for i, mask in zip(at, masks, strict=True)]

    def read(self, at: int) -> tuple[tuple[Entry, ...], str]:
        work = self.step.works[at]
        row = self.executor.rows[work.row]
        ids, _ = row.read(*work.read)
        assert work.start <= work.read[0] < work.read[1] <= work.start + work.count
        places = range(work.read[0] + 1, work.read[1] + 1)
        tops = (row.spec.logprobs if p >= row.prompt_len else 0 for p in places)
        return tuple(map(fake_logprob, ids, places, tops)), ""

    def pooled(self, at: int) -> bytes:
        work = self.step.works[at]
        seen = self.executor.seen(work)
        if work.want_pooled.startswith("token"):
            return np.array([*zip(seen, range(len(seen)), strict=True)], np.float32).tobytes()
        return np.array([sum(seen), len(seen)], np.float32).tobytes()

    def hidden(self, at: int, name: str) -> bytes:
        work = self.step.works[at]
        return np.array(self.executor.seen(work)[work.start :], np.float32).tobytes()

    def saved(self) -> tuple[Bytes, ...]:
        return self.blocks


def _columns(decodes: Decodes) -> tuple[np.ndarray, np.ndarray]:
    return np.frombuffer(decodes.rows, np.int32), np.frombuffer(decodes.starts, np.int32)


def fake_state(numbers: np.ndarray) -> int:
    """Stands for a recurrent layer's state after the numbers."""
    return zlib.crc32(numbers.astype(np.int64).tobytes())


def fake_encoded(scope: int, length: int) -> np.ndarray:
    """Stands for an encoder's output, the same for all sequences of a scope: int64 [length]."""
    return 1000 * scope + np.arange(length)


def fake_masked(token: int, mask: bytes | None, vocab: int) -> int:
    """The id, or the next id that the mask allows."""
    while mask is not None and not mask[token >> 3] >> (token & 7) & 1:
        token = (token + 1) % vocab
    return token


def fake_carry(before: bytes, tokens: list[int]) -> bytes:
    """A carry like Mirostat's: a function of the previous carry and the tokens since."""
    value = int.from_bytes(before, "little")
    for token in tokens:
        value = (value * 33 + token + 1) % 2**64
    return value.to_bytes(8, "little")


def fake_logprob(token: int, position: int, top: int = 0) -> tuple[int, float, int, tuple[tuple[int, float], ...]]:
    """The entry of an id at a position; its value shows the position it was read at."""
    best = tuple((token + i, -float(i + 1)) for i in range(top))
    return token, -1.0 - position / 64, 1, best
