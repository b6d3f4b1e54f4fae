"""FakeRunner: tokens one can compute by hand, and a cache that notices every mistake of a plan. No torch.

Each slot of its cache holds the token id whose keys and values would lie there. A row's next token is

    (31 * sum of all ids in the sequence + 7 * position + seed) mod vocab_size

where the ids are read *through the block tables of the plan*, as attention would: a block that was never written,
was given to somebody else, or was not copied shows up as a wrong token or a loud error.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping

import numpy as np

from kvasir.plan import CacheGroup, Capacity, Join, RowResult, StepPlan, StepResult, Work, unpack_ids
from kvasir.types import ModelInfo, Task

EMPTY = -1


def fake_next(ids: list[int], position: int, seed: int, vocab_size: int) -> int:
    """The token FakeRunner samples at `position` behind `ids`; seed is that of SamplingSpec."""
    return (31 * sum(ids) + 7 * position + seed % 1009) % vocab_size


class FakeRunner:
    """A runner without a model: `execute` and `sample` as the real one has them.

    step_seconds: how long a step takes. fault: called with each plan before it runs; may raise. deadly_token: an id
    that kills the whole process, as a faulty kernel would, when it is computed. overlaps: says that the next step may
    be planned meanwhile. window: of its one cache group, 0 for none; or of several, each with a cache of its own.
    """

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
        step_seconds: float = 0.0,
        deadly_token: int | None = None,
        fault=None,
        overlaps: bool = False,
        tasks: tuple[Task, ...] = (Task.GENERATE,),
        adapters: tuple[str, ...] = (),
        max_drafted: int = 8,
    ):
        self.windows = window if isinstance(window, tuple) else (window,)
        groups = tuple(
            CacheGroup("window" if w else "full", (g,), bytes_per_block=block_size * 8, window=w)
            for g, w in enumerate(self.windows)
        )
        sizes = (num_blocks,) * len(groups)
        self.capacity = Capacity(
            max_rows, max_tokens_per_step, max_model_len, block_size, groups, sizes, vocab_size, adapters, max_drafted
        )
        self.info = ModelInfo("fake", "fake", tasks, vocab_size, max_model_len, executor="fake")
        self.kernel_seconds = 0.0
        self.overlaps = overlaps
        self.step_seconds = step_seconds
        self.fault = fault
        self.deadly_token = deadly_token
        self.cache = np.full((len(groups), num_blocks, block_size), EMPTY, np.int64)
        self.rows: dict[int, Join] = {}
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}  # one of each group
        self.carries: dict[int, bytes] = {}
        self.failed: set[int] = set()  # rows of which a step gave an error
        self.saved: dict[int, tuple[bytes, ...]] = {}  # of steps under way
        self.arrived: set[int] = set()  # transfers of a connector that are done
        self.closed = False

    def execute(self, plan: StepPlan) -> StepPlan:
        assert not self.closed, "a step of a closed runner"
        for row in plan.left:
            del self.rows[row], self.tokens[row], self.tables[row], self.carries[row]
        for join in plan.joined:
            assert join.row not in self.rows, "a sequence joins in a row that is taken"
            assert 0 <= join.adapter <= len(self.capacity.adapters), "an adapter that is not there"
            self.rows[join.row] = join
            self.failed.discard(join.row)
            self.tokens[join.row] = _with_spans(join)
            self.tables[join.row] = [[] for _ in self.windows]
            self.carries[join.row] = join.carry
            if sampled := self.tokens[join.row][join.prompt_len :]:
                # A request made by hand may bring what an earlier engine had streamed without its carry.
                carries = (fake_carry(b"", sampled[i:]) for i in range(len(sampled)))
                assert not join.carry or join.carry in carries, "the carry is not that of the sampled tokens"
        if self.fault:
            self.fault(plan)
        self.saved[plan.step] = tuple(self.cache[save].tobytes() for save in plan.saves)
        if plan.copies:
            groups, sources, targets = map(list, zip(*plan.copies, strict=True))
            self.cache[groups, targets] = self.cache[groups, sources]
        for group, block, data in plan.loads:
            self.cache[group, block] = np.frombuffer(data, np.int64)
        for work in plan.work:
            if work.row not in self.failed:
                self._write(work)
        return plan

    def _write(self, work: Work) -> None:
        tables, ids = self.tables[work.row], self.tokens[work.row]
        assert set(work.pending) <= self.arrived, "the step reads blocks that have not arrived"
        ids += unpack_ids(work.appended)
        assert not work.indivisible or (work.start == 0 and work.count == len(ids)), "an indivisible prompt was cut"
        for table, (first, new) in zip(tables, work.blocks, strict=False):
            assert first <= len(table), "a gap in the block table"
            table[first:] = new
        assert work.start + work.count <= len(ids), "work beyond the known tokens"
        size = self.capacity.block_size
        for position in range(work.start, work.start + work.count):
            for group, table in enumerate(tables):
                block = table[position // size]
                assert block != 0, "a write into the scratch block"
                self.cache[group, block, position % size] = ids[position]
            if ids[position] == self.deadly_token:
                os.kill(os.getpid(), signal.SIGKILL)

    def sample(self, pending: StepPlan, masks: Mapping[int, bytes] = {}) -> StepResult:
        if self.step_seconds:
            time.sleep(self.step_seconds)
        results = tuple(
            RowResult(w.row, error="an earlier step failed")
            if w.row in self.failed
            else self._result(w, masks.get(w.row))
            for w in pending.work
        )
        self.failed |= {r.row for r in results if r.error}
        return StepResult(pending.step, results, self.saved.pop(pending.step))

    def close(self) -> None:
        self.closed = True

    def _result(self, work: Work, mask: bytes | None) -> RowResult:
        end = work.start + work.count
        seen = self._read(work.row, end)
        known = self.tokens[work.row]
        spec, prompt_len = self.rows[work.row].spec, self.rows[work.row].prompt_len
        assert work.read == (0, 0) or work.start <= work.read[0] < work.read[1] <= min(end, len(known) - 1)
        places = range(work.read[0] + 1, work.read[1] + 1) if any(work.read) else ()
        read = tuple(fake_logprob(known[p], p, spec.logprobs if p >= prompt_len else 0) for p in places)
        hidden = tuple((name, np.array(seen[work.start :], np.float32).tobytes()) for name in work.want_hidden)
        if work.want_pooled:
            return RowResult(work.row, pooled=np.array([sum(seen), len(seen)], np.float32).tobytes(), hidden=hidden)
        if not work.sample:
            return RowResult(work.row, read=read, hidden=hidden)
        tokens = self._draw(work, seen, mask)
        if not tokens:
            return RowResult(work.row, error="no token is allowed")
        del known[end - work.drafted :]
        known += tokens
        if not spec.guided:  # what a grammar forces is not sampled, so no carry knows of it
            self.carries[work.row] = fake_carry(self.carries[work.row], tokens)
        first = len(known) - len(tokens)
        entries = tuple(fake_logprob(t, first + i, spec.logprobs) for i, t in enumerate(tokens) if spec.logprobs >= 0)
        return RowResult(
            work.row,
            tuple(tokens),
            entries,
            read,
            self.carries[work.row],
            hidden=hidden,
            accepted=len(tokens) - 1,
        )

    def _draw(self, work: Work, seen: list[int], mask: bytes | None) -> list[int]:
        """The next token, and behind each drafted one that equals it the one after, as long as any is allowed."""
        join, end, vocab = self.rows[work.row], work.start + work.count, self.capacity.vocab_size
        positions = unpack_ids(work.positions)
        masks = [mask] * (work.drafted + 1)
        if mask and work.drafted:
            masks = [mask[i : i + len(mask) // len(masks)] for i in range(0, len(mask), len(mask) // len(masks))]
        tokens: list[int] = []
        for at, mask in zip(range(end - work.drafted, end + 1), masks, strict=True):
            if mask is not None and not any(mask):
                break
            position = positions[at - end - 1] + 1 if positions else at
            token = fake_next(seen[:at], position, join.spec.seed if join.spec.temperature else 0, vocab)
            if token in join.spec.stop_ids and at - join.prompt_len < join.spec.min_tokens:
                token = (token + 1) % vocab
            token = fake_masked(token, mask, vocab)
            tokens.append(token)
            if at < end and seen[at] != token:
                break
        return tokens

    def _read(self, row: int, end: int) -> list[int]:
        """All ids of the sequence, those within the widest window from the cache."""
        size, known = self.capacity.block_size, self.tokens[row][:end]
        ids = known
        for group, (window, table) in enumerate(zip(self.windows, self.tables[row], strict=True)):
            low = max(0, end - window) if window else 0
            seen = [int(self.cache[group, table[p // size], p % size]) for p in range(low, end)]
            assert seen == known[low:], "a row reads what it never wrote"
            ids = ids[:low] + seen
        return ids


def fake_masked(token: int, mask: bytes | None, vocab: int) -> int:
    """The id, or the next one that a mask allows."""
    while mask is not None and not mask[token >> 3] >> (token & 7) & 1:
        token = (token + 1) % vocab
    return token


def fake_carry(before: bytes, tokens: list[int]) -> bytes:
    """A carry as mirostat's would be: a function of the one before and of the tokens since."""
    value = int.from_bytes(before, "little")
    for token in tokens:
        value = (value * 33 + token + 1) % 2**64
    return value.to_bytes(8, "little")


def _with_spans(join: Join) -> list[int]:
    """The ids; where embeddings take their place, numbers made of the embeddings' hash."""
    ids = unpack_ids(join.ids)
    for span in join.spans:
        ids[span.start : span.start + span.length] = [span.hash[i % len(span.hash)] for i in range(span.length)]
    return ids


def fake_logprob(token: int, position: int, top: int = 0) -> tuple[int, float, int, tuple[tuple[int, float], ...]]:
    """Of an id at a position: tells which row it was read from."""
    best = tuple((token + i, -float(i + 1)) for i in range(top))
    return token, -1.0 - position / 64, 1, best
