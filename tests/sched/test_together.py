"""All that the scheduler can do, drawn at random and at once: it always comes to an end, every answer is that of its
request alone, and nothing is left behind.

The runner, the tier and the clock are driven by one source of chance: steps and rows fail, reads come late or never,
time passes by what the steps cost.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import Cross, Latent, PagedKV, State, Window
from kvasir.engine.core import EngineCore
from kvasir.errors import InvalidRequest, ModelFileError, QueueFull
from kvasir.inputs import NONE
from kvasir.kv.policy import POLICIES
from kvasir.kv.tiers.block import GroupFacts, Name, StoredBlock, StoreFacts
from kvasir.kv.tiers.connector import Bytes, Failed
from kvasir.plan import Ahead, Decodes, Encoders, StepPlan, StepResult, Work
from kvasir.runner.executor import Taken
from kvasir.runner.fake import FakeExecutor, FakeRunner, fake_logprob
from kvasir.runner.fake_adapters import FakePacked
from kvasir.runner.runner import Pending
from kvasir.sched.adapters import AdapterPool
from kvasir.sched.budget import StepTime, predict
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.sequence import Sequence as Seq
from kvasir.sched.service import load_of
from kvasir.statistics import TierStats
from kvasir.types import (
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    ServiceClass,
    Target,
    Task,
    TokenLogprob,
)
from tests.examples import examples
from tests.kv.chunked import Chunked
from tests.sched.drive import by_hand, content_of
from tests.sched.guides import HandGuides, allowed_at
from tests.sched.inputs import random_adapters, random_inputs, sources_of
from tests.sched.one_by_one import OneByOne

VOCAB, LENGTH = 256, 96
FULL, LATENT, STATE, CROSS = PagedKV(), Latent(), State(), Cross(length=10)
KINDS = (
    *((FULL,), (Window(window=20),), (STATE,), (FULL, Window(window=20)), (LATENT, STATE)),
    *((FULL, Window(window=12), STATE), (Window(window=9), Window(window=20)), (CROSS, FULL)),
    *((Window(window=1), CROSS), (STATE, LATENT, Cross(length=3), Chunked(chunk=12)), (Chunked(chunk=8),)),
)
COSTS = ((1e-3, 2e-3, 1e-6, 0.01), (0.02, 0.05, 0.0, 0.2), (0.0, 0.0, 0.0, 0.001))


class ShakyExecutor(FakeExecutor):
    """Rows fail alone."""

    chance: random.Random
    bad_rows = 0.0

    def draw(self, work: Work, mask: bytes | None) -> Taken:
        if self.bad_rows and self.chance.random() < self.bad_rows:
            return Taken(error="the row fails")
        return super().draw(work, mask)

    def draw_all(self, decodes: Decodes) -> tuple[np.ndarray, dict[int, str]]:
        tokens, _ = super().draw_all(decodes)
        bad = (place for place in range(len(decodes)) if self.bad_rows and self.chance.random() < self.bad_rows)
        return tokens, dict.fromkeys(bad, "the row fails")


class ShakyRunner(FakeRunner):
    """Steps fail before they run or after it, and rows alone."""

    samples = ShakyExecutor

    def __init__(self, chance: random.Random, bad_steps: float, bad_rows: float, **options):
        super().__init__(fault=self._before, **options)
        self.chance, self.bad_steps = chance, bad_steps
        self.executor.chance, self.executor.bad_rows = chance, bad_rows

    def _before(self, plan: StepPlan) -> None:
        if self.bad_steps and self.chance.random() < self.bad_steps:
            raise RuntimeError("the step fails")

    def sample(self, pending: Pending, masks: Mapping[int, bytes] = {}, ahead: Ahead | None = None) -> StepResult:
        if pending.step.plan.computes:
            self._before(pending.step.plan)
        return super().sample(pending, masks, ahead)


class Drafts(OneByOne):
    """Knows the answers, or takes the runner's guesses, and changes an id of a draft with a chance of `wrong`; some do
    not even exist."""

    def __init__(self, chance: random.Random, wrong: float):
        self.chance, self.wrong = chance, wrong
        self.guesses: dict[int, tuple[Seq, list[int], int]] = {}  # by the identity of a sequence
        self.used = 0

    def waits(self, sequences: Sequence[Seq]) -> bool:
        return self.chance.random() < 0.5

    def asks(self, seq: Seq, most: int) -> int:
        return self.chance.randrange(most + 1)

    def proposed(self, seq: Seq, ids: Sequence[int], after: int) -> None:
        assert seq.prompt_len < after <= len(seq.tokens)
        self.guesses[id(seq)] = seq, list(ids), after

    def guess(self, seq: Seq, most: int) -> list[int]:
        _, ids, after = self.guesses.pop(id(seq), (seq, [], 0))
        draft = ids[len(seq.tokens) - after :]
        self.used += bool(draft)
        if not draft:
            [answer] = by_hand(seq.request, VOCAB, LENGTH, frozenset({5, 77}), (seq.index,))
            draft = answer[len(seq.tokens) - seq.prompt_len :]
        draft = draft[: self.chance.randrange(most + 2)]
        return [self.chance.randrange(VOCAB + 1) if self.chance.random() < self.wrong else t for t in draft]


class ShakyLoads:
    """Adapters load for some steps, and some loads fail."""

    def __init__(self, chance: random.Random, bad: float):
        self.chance, self.bad = chance, bad
        self.open: list[tuple[str, Future]] = []

    def begin(self, path: str, content: str) -> Future:
        self.open.append((content, Future()))
        return self.open[-1][1]

    def proceed(self) -> None:
        for load in list(self.open):
            if self.chance.random() < 0.4:
                self.open.remove(load)
                if self.chance.random() < self.bad:
                    load[1].set_exception(ModelFileError("the load fails"))
                else:
                    load[1].set_result(FakePacked(load[0], 1))

    def close(self) -> None: ...


class ShakyTier:
    """A KVConnector in memory: reads take some polls, fail, or never come; parts are lost."""

    name = "shaky"

    def __init__(self, chance: random.Random, facts: StoreFacts, bad: float):
        self.facts, self.chance, self.bad = facts, chance, bad
        self.parts: dict[tuple[bytes, int], bytes] = {}
        self.open: dict[int, tuple[tuple[bytes, int], int]] = {}  # ticket -> part, polls to come
        self.tickets = self.loaded = 0

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        return self.chance.random() < 0.5

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        return (key, group) not in self.parts

    def read_seconds(self, names: Sequence[Name]) -> float:
        return 1e-6 * self.facts.groups[0].num_bytes * (len(names) + len(self.open))

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        return next((i for i, key in enumerate(keys) if (key, group) not in self.parts), len(keys))

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        self.tickets += 1
        polls = 1 << 30 if self.chance.random() < self.bad else self.chance.choice([0, 0, 1, 4])
        self.open[self.tickets] = (block.key, group), polls
        return self.tickets

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        name, polls = self.open.pop(ticket)
        if polls:
            self.open[ticket] = name, polls - 1
            return None
        if name not in self.parts or self.chance.random() < self.bad:
            return Failed("missing")
        self.loaded += 1
        return memoryview(self.parts[name])

    def cancel(self, ticket: int) -> None:
        del self.open[ticket]

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        if self.chance.random() < self.bad:
            return False
        self.parts[block.key, group] = bytes(payload)
        if self.chance.random() < self.bad:
            del self.parts[self.chance.choice(list(self.parts))]
        return True

    def ending(self) -> None:
        pass

    def each(self) -> dict[str, TierStats]:
        return {self.name: self.stats()}

    def stats(self) -> TierStats:
        size = self.facts.groups[0].num_bytes
        return TierStats({}, {}, 0, 0, 0, 1e6, len(self.open), len(self.open) * size)

    def close(self, timeout: float = 5.0) -> None:
        pass


@dataclass
class Run:
    """One engine with drawn options, and what came of the requests it took."""

    chance: random.Random
    now: float = 0.0
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    entries: dict[tuple[str, int], list] = field(default_factory=lambda: defaultdict(list))
    last: dict[tuple[str, int], Delta] = field(default_factory=dict)
    prompts: dict[str, tuple] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    faulty: bool = False
    jumped: int = 0
    read: int = 0

    def __post_init__(self):
        draw = self.chance
        kinds, size = draw.choice(KINDS), draw.choice([4, 8, 16])
        bad_steps, bad_rows = draw.choice([0, 0, 0.03, 0.2]), draw.choice([0, 0, 0.02])
        self.faulty = bool(bad_steps or bad_rows)
        self.bidirectional = draw.random() < 0.1
        step_tokens = draw.choice([1, 2, 7, 23, 64])
        runner = ShakyRunner(
            draw, bad_steps, bad_rows,
            kinds=kinds, block_size=size, num_blocks=draw.choice([9, 12, 15, LENGTH // size + 2, 60]),
            max_rows=draw.choice([1, 2, 3, 6]), max_tokens_per_step=LENGTH if self.bidirectional else step_tokens,
            max_model_len=LENGTH, overlaps=draw.random() < 0.5,
            encoders=Encoders(*draw.choice([(28 * 8, 8, 14), (42 * 8, 8, 28), (1 << 20, 8, 100)])),
            guesses=draw.choice([None, 0.0, 0.6, 1.0]),
        )  # fmt: skip
        groups = tuple(GroupFacts("ids", group.bytes_per_block) for group in runner.capacity.groups)
        tier = ShakyTier(draw, StoreFacts("fake", "1", size, groups), draw.choice([0, 0.1, 0.5]))
        self.tier = tier if draw.random() < 0.5 and not self.bidirectional else None
        tight = draw.choice([0.02, 1.0, 50.0])
        self.loads = ShakyLoads(random.Random(draw.getstate()[1][0]), 0.05 if self.faulty else 0.0)
        self.guides = HandGuides(at_once=draw.random() < 0.5)
        self.drafter = Drafts(draw, draw.choice([0.0, 0.5, 1.0])) if draw.random() < 0.5 else None
        max_chunk = draw.choice([1, 3, 17, 2**31]) if not self.bidirectional else 2**31
        self.most_at_once = min(max_chunk, runner.capacity.max_tokens_per_step)
        scheduler = Scheduler(
            runner.capacity,
            drafter=self.drafter,
            eos_ids=(5, 77),
            bidirectional=self.bidirectional,
            max_chunk=max_chunk,
            max_waiting=draw.choice([4, 1024]),
            prefix_cache=draw.random() < 0.8,
            eviction=draw.choice(list(POLICIES)),
            targets={c: Target(tight * (1 + i), tight / 10) for i, c in enumerate(ServiceClass)},
            clock=lambda: self.now,
            tier=self.tier,
            tier_bytes=draw.choice([size * 8 * len(kinds) * 2, 1 << 20]),
            guides=self.guides,
            jump_ahead=draw.random() < 0.7,
            adapters=AdapterPool(self.loads, self.loads.chance.choice([1, 1, 2, 8]), 1 << 20, clock=lambda: self.now),
        )
        self.core, self.costs = EngineCore(runner, scheduler), StepTime(draw.choice(COSTS))
        self._observe, scheduler.service.observe = scheduler.service.observe, self._pass

    def _pass(self, plan: StepPlan, seconds: float) -> None:
        """A step takes what its work costs."""
        seconds = predict(self.costs, load_of(plan)) * self.chance.choice([1, 1, 1, 3])
        self.now += seconds
        self._observe(plan, seconds)

    def ask(self, texts: list[list[int]]) -> None:
        draw, id = self.chance, f"r{len(self.requests)}"
        text = draw.choice(texts)[: draw.randrange(65)]
        prompt = tuple(text + [draw.randrange(VOCAB) for _ in range(draw.randrange(1, 12))])
        embeds = self.bidirectional or draw.random() < 0.05
        grammar = f"{draw.randrange(1000)} {draw.randrange(1, 30)}" if draw.random() < 0.3 and not embeds else None
        params = SamplingParams(
            n=draw.choice([1, 1, 2, 4]) if not embeds else 1,
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(2000),
            max_tokens=draw.choice([1, 3, 12, 30]) if not embeds else 1,
            min_tokens=draw.choice([0, 1]) if not grammar else 0,
            ignore_eos=draw.random() < 0.5,
            logprobs=1 if draw.random() < (0.5 if grammar else 0.1) and not embeds else None,
            prompt_logprobs=0 if draw.random() < 0.1 and not embeds else None,
        )
        adapters = random_adapters(draw, len(prompt)) if draw.random() < 0.15 else ()
        inputs = random_inputs(draw, len(prompt), self.most_at_once) if draw.random() < 0.3 else NONE
        alone = Request(id, prompt, params, grammar=grammar, adapters=adapters, inputs=inputs)
        answers = by_hand(alone, VOCAB, LENGTH, frozenset({5, 77}))
        resumed = draw.random() < 0.1 and not embeds and all(len(a) > 1 for a in answers)
        request = Request(
            id,
            prompt,
            params,
            task=Task.EMBED if embeds else Task.GENERATE,
            slo=draw.choice(list(ServiceClass)),
            priority=draw.randrange(3),
            tenant=(tenant := draw.choice("abc")),
            weight={"a": 1.0, "b": 2.0, "c": 0.5}[tenant],
            deadline=draw.choice([0.05, 2.0]) if draw.random() < 0.1 else None,
            cache_salt=draw.choice([None, None, None, "x"]),
            no_cache=draw.random() < 0.1,
            cache_ttl=draw.choice([0.01, 5.0, 1e9]) if draw.random() < 0.15 else None,
            adapters=adapters,
            inputs=inputs,
            sources=sources_of(inputs),
            grammar=grammar,
            resume_ids=tuple(tuple(a[: draw.randrange(len(a))]) for a in answers) if resumed else (),
        )
        try:
            self.core.add(request)
        except (InvalidRequest, QueueFull):
            return
        self.requests[id] = request

    def step(self) -> None:
        if self.chance.random() < 0.5:
            self.guides.compile()
        self.loads.proceed()
        for delta in self.core.step():
            key = delta.id, delta.index
            assert key not in self.last or self.last[key].finish_reason is None, "a delta behind the last one"
            self.tokens[key] += delta.token_ids
            self.entries[key] += delta.logprobs
            self.jumped += len(delta.token_ids) > 1
            self.read += len(delta.logprobs) > 1
            self.last[key] = delta
            if delta.prompt_logprobs is not None:
                self.prompts[delta.id] = delta.prompt_logprobs
        self.core.check()
        self.now += 0.001

    def disturb(self) -> None:
        draw, scheduler = self.chance, self.core.scheduler
        if scheduler.running and draw.random() < 0.05:
            scheduler.preempt(draw.choice(scheduler.running))
        if self.requests and draw.random() < 0.08:
            self.pause(draw.choice(list(self.requests)), True)
        if self.paused and draw.random() < 0.1:
            self.pause(draw.choice(sorted(self.paused)), False)
        if self.requests and draw.random() < 0.03:
            id = draw.choice(list(self.requests))
            self.core.abort(id, draw.choice([None, 0]))
            self.aborted.add(id)

    def pause(self, id: str, whether: bool) -> None:
        """A reader lets its answers lie, or has taken them."""
        (self.paused.add if whether else self.paused.discard)(id)
        self.core.pause(id, whether)

    def proceed(self) -> None:
        """If nothing else has work, checks that the rest is paused; resumes one of the paused requests."""
        if not self.core.has_work():
            table = self.core.scheduler.table
            assert table.all() == table.paused, "what is not paused waits for what is"
        self.pause(self.chance.choice(sorted(self.paused)), False)

    def judge(self) -> None:
        """What each answer had to be."""
        for request in self.requests.values():
            expected = by_hand(request, VOCAB, LENGTH, frozenset({5, 77}))
            for i, answer in enumerate(expected):
                resumed = request.resume_ids[i] if request.resume_ids else ()
                self._judge(request, i, answer[len(resumed) :], len(resumed))

    def _judge(self, request: Request, index: int, answer: list[int], resumed: int) -> None:
        last, got = self.last.get((request.id, index)), self.tokens[request.id, index]
        reason = last.finish_reason if last else None
        if reason is None:
            assert request.id in self.aborted, f"{request.id} has no end"
        elif reason is FinishReason.ERROR:
            assert self.faulty, last
        elif reason is FinishReason.TIMEOUT:
            assert request.deadline is not None
        elif request.task is Task.EMBED:
            numbers = content_of(request, LENGTH).numbers(np.array(request.prompt_ids))
            assert last and last.embedding == tuple(np.array([sum(numbers), len(numbers)], np.float32).tolist())
            return
        else:
            assert got == answer, (request.id, index)
            stopped = not request.params.ignore_eos and answer[-1] in (5, 77)
            stopped = stopped and resumed + len(answer) > request.params.min_tokens
            complete = request.grammar and not allowed_at(request.grammar, resumed + len(answer))
            assert reason is (FinishReason.STOP if stopped or complete else FinishReason.LENGTH)
        assert got == answer[: len(got)], (request.id, index, reason)
        entries, begin = self.entries[request.id, index], len(request.prompt_ids) + resumed
        wanted = request.params.logprobs is not None
        assert entries == [TokenLogprob(*fake_logprob(t, begin + i, 1)) for i, t in enumerate(got) if wanted]
        if got and index == 0 and request.params.prompt_logprobs is not None and not request.resume_ids:
            expected = [TokenLogprob(*fake_logprob(t, i)) for i, t in enumerate(request.prompt_ids)]
            assert list(self.prompts[request.id]) == [None, *expected[1:]]


def run(chance: random.Random, num_requests: int = 12) -> Run:
    drawn = Run(chance)
    core = drawn.core
    texts = [[chance.randrange(VOCAB) for _ in range(64)] for _ in range(2)]
    for _ in range(num_requests):
        drawn.ask(texts)
        for _ in range(chance.choice([0, 0, 1, 3, 10])):
            drawn.disturb()
            drawn.step()
    # One step per token, repeated after failures and reads: far more than is ever needed.
    for _ in range(200 * LENGTH):
        if not core.has_work() and not drawn.paused:
            break
        if drawn.paused and (not core.has_work() or chance.random() < 0.05):
            drawn.proceed()
        drawn.step()
    assert not core.has_work() and not core.scheduler.table.all(), "it does not come to an end"
    drawn.judge()
    core.close()
    core.check()
    core.scheduler.kv.tree.expire(float("inf"))
    assert core.scheduler.kv.used == 0
    assert drawn.tier is None or not drawn.tier.open
    core.scheduler.kv.tree.clear()
    assert all(pool.free == pool.total for pool in core.scheduler.kv.pools)
    return drawn


@examples(25)
@given(st.integers(0, 2**32))
def test_any_mix_of_requests_comes_to_an_end(seed):
    run(random.Random(seed))


@pytest.mark.slow
def test_the_chance_reaches_everything():
    """What the property is about does happen."""
    seen: dict[str, int] = defaultdict(int)
    for seed in range(60, 100):
        drawn = run(random.Random(seed))
        scheduler = drawn.core.scheduler
        seen["preempted"] += scheduler.preemptions
        seen["hit"] += scheduler.cached_tokens
        seen["paused"] += scheduler.pauses
        seen["evicted"] += scheduler.kv.tree.stats().evicted
        seen["loaded"] += scheduler.loaded_tokens
        seen["replaced"] += scheduler.adapters.evictions
        seen["guided"] += sum(r.grammar is not None for r in drawn.requests.values())
        seen["jumped"] += drawn.jumped
        seen["read"] += drawn.read
        seen["drafted"] += drawn.core.scheduler.drafted_tokens
        seen["accepted"] += drawn.core.scheduler.accepted_tokens
        seen["guessed"] += drawn.drafter.used if drawn.drafter else 0
        for delta in drawn.last.values():
            seen[str(delta.finish_reason)] += 1
    reached = (
        "preempted paused hit evicted loaded replaced guided jumped read drafted accepted guessed stop length error "
        "timeout"
    )
    for what in reached.split():
        assert seen[what] > 0, what


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_thousands_of_them(part):
    for seed in range(500):
        run(random.Random(f"{part}.{seed}"))
