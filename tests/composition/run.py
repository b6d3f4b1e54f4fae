"""One run of an engine under a cell's features, step by step, and what it counted."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from kvasir.adapters import parse_adapters
from kvasir.config import EngineConfig, EngineOptions
from kvasir.engine.adapters import AdapterNames
from kvasir.engine.answer import AnswerText
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.engine.front import Front
from kvasir.engine.journal import Journal, RequestStage
from kvasir.plan import StepPlan, Work
from kvasir.resolve import resolve
from kvasir.sched.drafts import Drafter
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Delta, FinishReason, Request, SamplingParams, Task
from tests.composition import models
from tests.composition.beside import Alone
from tests.kv._tiers import until
from tests.oracle import Answer, Answers, free_blocks
from tests.program.mini import TEXT

Params = dict[str, Any]
LENGTHS = (131, 5, 125, 16, 33)  # of prompts: blocks and tiles of keys are crossed, and just filled
NUM_REQUESTS = len(LENGTHS)


def make_requests(
    core: EngineCore,
    tokenizer: Tokenizer | None,
    params: Sequence[Params],
    fields: Sequence[Params],
    embed: bool = False,
) -> list[Request]:
    """A request of each parameters and further fields, as the front half resolves them; `adapters` as it would give
    them. embed: a model that can only embed is asked for that. Raises InvalidRequest."""
    assert tokenizer is not None
    front = Front(cast(Any, SimpleNamespace(info=core.info, adapters=())), tokenizer)
    requests = []
    for i, (length, p, f) in enumerate(zip(LENGTHS, params, fields, strict=True)):
        ids = tokenizer.encode(TEXT[i * 9 :] + TEXT * 3, add_special_tokens=False)[:length]
        f, adapters = {**f, "adapters": None}, f.get("adapters", ())
        if embed and Task.GENERATE not in core.info.tasks:
            request = front.resolve_embedding(ids, id=f"r{i}", **f)
        else:
            request = front.resolve(ids, SamplingParams(**p), id=f"r{i}", **f)
        requests.append(replace(request, adapters=adapters))
    return requests


class Reading:
    """An answer on its way through the front half: its text is made delta by delta, or at its end."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request, streams: bool):
        self._text = AnswerText(tokenizer, request.prompt_ids, request.params)
        self._streams, self._deltas = streams, []
        self.answer, self.pushed = Answer(), 0

    @property
    def done(self) -> bool:
        return self._text.done

    def take(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if not (self._streams or delta.finish_reason):
            return
        delta, self._deltas = joined(self._deltas), []
        reported = self._text.push(delta)
        ended = {"token_ids": reported.token_ids, "finish_reason": reported.finish_reason}
        self.answer.take(replace(delta, logprobs=delta.logprobs[: len(reported.token_ids)], **ended))
        self.answer.text += reported.text
        self.answer.stop = reported.stop_reason
        self.pushed += 1


def joined(deltas: Sequence[Delta]) -> Delta:
    """Several deltas of an answer as one."""
    prompt = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
    ids, entries = sum((d.token_ids for d in deltas), ()), sum((d.logprobs for d in deltas), ())
    return replace(deltas[-1], token_ids=ids, logprobs=entries, prompt_logprobs=prompt)


def with_host_tier(options: EngineOptions, *facts: Any) -> EngineConfig:
    """On the CPU, whose pool is host memory, no engine has a tier there: requested in a run, it gets one."""
    return replace(resolve(replace(options, cache_host=None), *facts), cache_host=options.cache_host or 0)


def at_once(begin: Callable[..., Future]) -> Callable[..., Future]:
    """The same, with results that are there when it returns."""

    def begun(*args: Any) -> Future:
        future = begin(*args)
        wait([future])
        return future

    return begun


class Run:
    """Drives engines made of `options`: `go` gives the answers; the counts are for proofs.

    acts: called before each step. together: requests arrive over some steps, else each when all before it are done.
    plant: called with each engine before it computes. drafter: makes what proposes ids that may come next. expected:
    the plain answers of a request. beside: which engines there are; acts have them in turn.
    """

    def __init__(
        self,
        options: Params,
        *,
        seed: int = 0,
        acts: Sequence[Callable[[Run], None]] = (),
        together: bool = False,
        streams: bool = False,
        plant: Callable[[EngineCore], None] | None = None,
        drafter: Callable[[Run], Drafter] | None = None,
        expected: Callable[[Request], Answers] | None = None,
        beside: Alone | None = None,
    ):
        self.drafter, self._expected, self._beside = drafter, expected, beside or Alone()
        self.options, self._acts, self._plant = EngineOptions(**options), acts, plant
        self._together, self._streams = together, streams
        self.random = random.Random(seed)
        self.tokenizer = models.tokenizer(self.options.model, self.options.tokenizer)
        self.requests: list[Request] = []
        self.answers: Answers = {}
        self.plans: list[StepPlan] = []
        self.cores: list[EngineCore] = []
        self.engines: list[EngineCore] = []  # beside each other
        self.homes: dict[str, int] = {}  # the engine of each request
        self._free: list[list[frozenset[int]]] = []  # per engine and cache group, blocks that were free a step ago
        self.step = self.pushed = self.waited = self.aborted = self.overlapped = self.poisoned = 0
        self.restarts = self.timeouts = self.displaced = self.displaceable = self.pinned = self.saved = 0
        self.preemptable = self.moved = self.movable = self.met = 0
        self.unread: dict[str, int] = {}  # requests whose readers have stopped, and the step at which they continue
        self.answered: dict[tuple[str, int], int] = {}  # that have begun, and what they found in the cache
        self.part_way: set[tuple[str, int]] = set()  # choices that a delta of the engine did not complete
        self._journal, self._neighbours = Journal(self._clock), set()
        self.names = AdapterNames()
        self._build()
        for option in parse_adapters(self.options.lora or ()):
            self.load_adapter(option.name, option.path)

    # -- what proofs ask

    @property
    def core(self) -> EngineCore:
        """The engine whose turn it is."""
        return self.engines[self.step % len(self.engines)]

    @property
    def free_blocks(self) -> list[frozenset[int]]:
        """Per cache group, those of this engine that were free at its last step."""
        return self._free[self.step % len(self.engines)]

    @property
    def under_way(self) -> list[str]:
        """Requests that an engine has, in the order of their arrival."""
        entries = self._journal.entries.items()
        return [] if self._journal.on_trial else [n for n, e in entries if e.stage and n not in self._neighbours]

    def begun(self, name: str) -> bool:
        """Whether each choice of the request that has not ended has a token."""
        entry = self._journal.entries[name]
        return all(entry.streamed.get(i) for i in entry.open)

    def expected(self, request: Request) -> Answers:
        assert self._expected
        return self._expected(request)

    @property
    def works(self) -> Iterator[Work]:
        return (work for plan in self.plans for work in plan.works)

    @property
    def steps(self) -> int:
        return len(self.plans)

    @property
    def block_size(self) -> int:
        return self.core.runner.capacity.block_size

    @property
    def threads(self) -> int | None:
        """How many compute; None for float32 on the eager executor, where torch must have one."""
        import torch

        if program := getattr(self.core.runner.executor, "program", None):
            return program.pool.threads
        return None if self.core.info.dtype == "float32" else torch.get_num_threads()

    def total(self, counter: str) -> int:
        """A counter of the scheduler, over all engines of this run."""
        return sum(getattr(core.scheduler, counter) for core in self.cores)

    @property
    def evicted(self) -> int:
        """Blocks, over all engines of this run."""
        return sum(core.scheduler.kv.tree.stats().evicted for core in self.cores)

    def says(self, text: str) -> bool:
        """Whether the engine says so of itself."""
        return any(text in line for line in self.core.summary if not line.startswith("note"))

    @property
    def crowded(self) -> bool:
        """Several are under way, the latest with tokens, or there will be no more of them."""
        under_way = list(self._journal.entries.values())
        return not (self._together and self.arriving) or (len(under_way) > 1 and bool(under_way[-1].streamed))

    # -- what acts do

    def submit_neighbour(self, name: str, **fields: Any) -> None:
        """A request with the prompt of the third one and further fields, whose result is not used."""
        self._neighbours.add(name)
        self.homes[name] = self.engines.index(self.core)
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=12, ignore_eos=True)
        self._journal.add(self.names.resolve(replace(self.requests[2], id=name, params=params, **fields)))

    def abort(self, name: str) -> None:
        core = self.engines[self.homes.get(name, 0)]
        before = core.scheduler.aborted
        self._journal.forget(name)
        core.abort(name)
        self.aborted += core.scheduler.aborted > before

    def move(self, name: str) -> None:
        """The request goes on in the other engine, with what its client was given so far."""
        entry, self.moved = self._journal.entries[name], self.moved + 1
        self.engines[self.homes[name]].abort(name)
        self.homes[name] = 1 - self.homes[name]
        entry.stage, entry.returned = RequestStage.HELD, True

    def stop_reading(self, name: str, steps: int) -> None:
        """The reader of a request takes nothing for so many steps, so the engine is asked to pause it."""
        self.unread[name] = self.step + steps
        self._set_paused(name, True)

    def read_again(self, name: str) -> None:
        del self.unread[name]
        self._set_paused(name, False)

    def _set_paused(self, name: str, whether: bool) -> None:
        self._journal.pause(name, whether)
        self.engines[self.homes[name]].pause(name, whether)

    def warm(self, made: Callable[[tuple[int, ...]], tuple[int, ...]], fields: Params, adapted: bool = False) -> None:
        """Others run to their ends, one by one, with prompts made of those that will come; the first is like the last
        to come. adapted: like those only that have an adapter."""
        for request in reversed([r for r in self.arriving if r.adapters or not adapted]):
            ids = made(request.prompt_ids)
            warm = replace(request, id=f"warm {request.id}", prompt_ids=ids, **fields)
            self.core.add(self.names.resolve(warm))
            while self.core.has_work():
                self.core.step()

    def load_adapter(self, name: str, path: str) -> None:
        """Requests that come from now on have it under this name."""
        info = replace(self.core.runner.read_adapter(path), name=name)
        if lost := self.names.put(info):
            for core in self.engines:
                core.drop_adapter(lost)

    def move_to_tier(self, fresh: bool) -> None:
        """What the prefix cache holds is given to the tier and forgotten; fresh: with its engine, as at its end."""
        core = self.core
        core.close(30.0) if fresh else self._write_all()
        self.saved += core.stats().tier_saves.get("saved", 0)
        if fresh:
            self._close()
            self._build()

    def _write_all(self) -> None:
        core, scheduler = self.core, self.core.scheduler
        for plan in scheduler.last_plans():
            self.plans.append(plan)
            pending = core.runner.execute(plan)
            scheduler.commit(plan, core.runner.sample(pending, scheduler.masks(plan), scheduler.ahead(plan)))
        store = scheduler.store
        until(lambda: store and not store.tier.stats().queued_bytes)
        scheduler.kv.tree.expire(inf)
        scheduler.kv.tree.clear()

    def restart(self) -> None:
        """The engine is gone, and a fresh one is sent what was not complete, as after a crash. If that is more than one
        request, it dies with them as well: they are suspects then, and go to the next one half by half."""
        self._die()
        self._send(returned := self._journal.to_send())
        if len(returned) > 1:
            self._journal.reached([request.id for request in returned], RequestStage.JOINED)
            self._die()
            assert self._journal.on_trial, "suspects that go on together"

    def _die(self) -> None:
        self.restarts += 1
        self._close()
        assert not self._journal.death(), "a request is given up, though others may have been to blame"
        self._build()

    # -- the run

    def go(self, requests: Sequence[Request]) -> Answers:
        self.requests, self.arriving = list(requests), list(requests)
        if self._together:
            self.random.shuffle(self.arriving)
        self._readings = {
            (r.id, i): Reading(self.tokenizer, r, self._streams) for r in requests for i in range(r.params.n)
        }
        while self.arriving or self._journal.entries or any(core.has_work() for core in self.engines):
            self._step()
            assert self.step < 20000, "no end"
        self._close()
        if self.options.cache_dir:
            shutil.rmtree(self.options.cache_dir)
        self.answers = {key: reading.answer for key, reading in self._readings.items()}
        assert all(answer.reason for answer in self.answers.values()), "an answer without an end"
        self.pushed = sum(r.pushed - 1 for r in self._readings.values())
        return self.answers

    def _step(self) -> None:
        for act in (*self._acts, self._beside.act):
            act(self)
        self._arrive()
        self._free = [free_blocks(core) for core in self.engines]
        self._send(self._journal.to_send())
        self.met += len(self.engines) > 1 and len(self.under_way) > 1  # in one of the engines, or beside each other
        planned = len(self.plans)
        for core in self.engines:
            self._step_of(core)
        if len(self.plans) == planned:
            self._beside.idle()
        self.step += 1

    def _step_of(self, core: EngineCore) -> None:
        scheduler, planned, under_way = core.scheduler, len(self.plans), core.in_progress
        deltas = core.step()
        self.overlapped += under_way and len(self.plans) > planned
        self.waited += bool(scheduler.waiting and len(scheduler.running) < core.runner.capacity.max_rows)
        for sequences, stage in ((scheduler.waiting, RequestStage.TAKEN), (scheduler.running, RequestStage.JOINED)):
            self._journal.reached([s.request.id for s in sequences if self._has(core, s.request.id)], stage)
        self.pinned = max(self.pinned, scheduler.kv.tree.stats().pinned)
        for delta in deltas:
            if self._has(core, delta.id):
                self._take(delta)
        core.check()

    def _has(self, core: EngineCore, name: str) -> bool:
        """Whether this engine has the request, which another may have computed before."""
        return self.engines[self.homes[name]] is core

    def _send(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engines[self.homes[request.id]].add(self._beside.routed(self, request))

    def _arrive(self) -> None:
        idle = not self._journal.entries
        count = self.random.randint(idle, 2) if self._together else int(idle)
        for request in self.arriving[:count]:
            resolved = self.names.resolve(request)
            self.requests[self.requests.index(request)] = resolved
            self.homes[request.id] = self._beside.home(self, resolved)
            self._journal.add(resolved)
        del self.arriving[:count]

    def _take(self, delta: Delta) -> None:
        self._journal.take(delta)
        if delta.id in self._neighbours:
            self.timeouts += delta.finish_reason is FinishReason.TIMEOUT
            return
        self.answered.setdefault((delta.id, delta.index), delta.cached_tokens)
        reading = self._readings[delta.id, delta.index]
        if reading.done:  # a step was under way when its text ended it
            return
        reading.take(delta)
        if not reading.done:
            self.part_way.add((delta.id, delta.index))
        elif not delta.finish_reason:
            self._journal.abandon(delta.id, delta.index)
            self.engines[self.homes[delta.id]].abort(delta.id, delta.index)

    def _build(self) -> None:
        self.engines = [self._built(options) for options in self._beside.options(self.options)]
        self.cores += self.engines
        self._free = [free_blocks(core) for core in self.engines]
        self._beside.built(self.engines)

    def _built(self, options: EngineOptions) -> EngineCore:
        with patch("kvasir.engine.build.resolve", with_host_tier):
            core = build_core(options, drafter=self.drafter(self) if self.drafter else None)
        core.runner.cache.fill_(float("nan"))  # type: ignore[attr-defined]  # unwritten memory must not be read
        core.plan_listener = self.plans.append
        core.scheduler.table.lane.least = 1  # these runs have few rows
        self._pace(core)
        self._count_displaced(core)
        if self._plant:
            self._plant(core)
        return core

    def _pace(self, core: EngineCore) -> None:
        """The clock counts steps, a step takes what its tokens take, grammars and adapters nothing: so a run goes the
        same way every time. These models are computed faster than any disk is read: where there is one, computing
        takes long."""
        service, guides, loader = core.scheduler.service, core.scheduler.guides, core.scheduler.adapters._loader
        assert guides and loader
        guides.begin = at_once(guides.begin)  # type: ignore[method-assign]
        loader.begin = at_once(loader.begin)  # type: ignore[method-assign]
        observe = service.observe

        def steady(plan: StepPlan, seconds: float) -> None:
            observe(plan, 2e-3 + 2e-4 * plan.num_tokens)

        service.observe, core.scheduler.clock = steady, self._clock
        if core.scheduler.store:
            service.prefill_seconds = lambda start, tokens: 30.0

    def _clock(self) -> float:
        return 0.01 * self.step

    def _count_displaced(self, core: EngineCore) -> None:
        scheduler = core.scheduler
        displace = scheduler.planner.displace

        def counted() -> None:
            before = scheduler.preemptions
            displace()
            self.displaced += scheduler.preemptions - before

        scheduler.planner.displace = counted

    def _close(self) -> None:
        for core in self.engines:
            core.runner.close()  # type: ignore[attr-defined]  # which waits for a step that is never committed
            if store := core.scheduler.store:
                store.tier.close(0.0)
            if exchange := core.scheduler.tiering.exchange:
                exchange.close(0.0)
