"""Drives a Scheduler over the FakeRunner and gives the answers one can compute by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from kvasir.inputs import Adapter
from kvasir.plan import StepPlan
from kvasir.runner.fake import FakeRunner, fake_masked, fake_next
from kvasir.runner.fake_adapters import FakePacked
from kvasir.runner.fake_content import PLAIN, FakeContent
from kvasir.sched.adapters import AdapterPool
from kvasir.sched.scheduler import Scheduler
from kvasir.seeds import answer_seed
from kvasir.types import Delta, FinishReason, Request, SamplingParams, each_delta
from tests.sched.guides import allowed_at, mask_at

ADAPTERS = ("x", "y")


def adapter(name: str, scale: float = 1.0, start: int = 0, content: str = "", nbytes: int = 1) -> Adapter:
    """As an engine's handle completes it."""
    return Adapter(name, scale, start, content or f"content of {name}", name, nbytes)


class AtOnce:
    """Loads adapters at once."""

    def begin(self, path: str, content: str) -> Future:
        done: Future = Future()
        done.set_result(FakePacked(content, 1))
        return done

    def close(self) -> None: ...


def adapter_pool(ids: int = 8) -> AdapterPool:
    """Whose adapters are loaded at once."""
    return AdapterPool(AtOnce(), ids, 1 << 20)


def request(id: str, prompt: list[int], **params) -> Request:
    params.setdefault("max_tokens", 8)
    return Request(id, tuple(prompt), SamplingParams(**params))


def by_hand(
    request: Request,
    vocab: int,
    max_len: int,
    eos: frozenset[int] = frozenset(),
    which: Sequence[int] | None = None,
) -> list[list[int]]:
    """The answers of a request alone, or `which` of them, from the definition of FakeRunner's tokens."""
    p, answers = request.params, []
    content = content_of(request, max_len)
    for i in range(p.n) if which is None else which:
        ids, out = list(request.prompt_ids), []
        stops = set(p.stop_token_ids) | (set() if p.ignore_eos else set(eos))
        while len(out) < (p.max_tokens or max_len) and len(ids) < max_len:
            numbers = content.numbers(np.array(ids)).tolist()
            token = fake_next(
                numbers, len(ids) + content.ahead, answer_seed(p.seed or 0, i) if p.temperature else 0, vocab
            )
            if token in stops and len(out) < p.min_tokens:
                token = (token + 1) % vocab
            if request.grammar:
                token = fake_masked(token, mask_at(request.grammar, len(out)), vocab)
            ids.append(token)
            out.append(token)
            stopped = token in stops and len(out) > p.min_tokens
            if stopped or (request.grammar and not allowed_at(request.grammar, len(out))):
                break
        answers.append(out)
    return answers


def content_of(request: Request, max_len: int) -> FakeContent:
    """What the request is computed from."""
    if not request.inputs and not request.adapters:
        return PLAIN
    return FakeContent(request.inputs, request.adapters, max_len + 1)


class Drive:
    """Collects what a scheduler's deltas bring. `ahead` plans step N + 1 before step N is committed."""

    def __init__(self, scheduler: Scheduler, runner: FakeRunner, ahead: bool = False):
        self.scheduler, self.runner, self.ahead = scheduler, runner, ahead
        self.tokens: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.reasons: dict[tuple[str, int], FinishReason] = {}
        self.plans: list[StepPlan] = []
        self.pending: list[StepPlan] = []

    def step(self) -> list[Delta]:
        if self.scheduler.drafter:
            self.scheduler.drafter.learn(1 << 20)
        late = [*self.scheduler.enter_grammars(), *self.scheduler.take_adapters()]
        for d in late:
            self.reasons[d.id, d.index] = d.finish_reason
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)
            self.pending.append(plan)
        if self.pending and (plan is None or not self.ahead or len(self.pending) > 1):
            return self._commit(self.pending.pop(0))
        return []

    def _commit(self, plan: StepPlan) -> list[Delta]:
        for id, content in plan.adapters:
            self.runner.set_adapter(id, self.scheduler.adapters.held(content))
        pending = self.runner.execute(plan)
        result = self.runner.sample(pending, self.scheduler.masks(plan), self.scheduler.ahead(plan))
        deltas = each_delta(self.scheduler.commit(plan, result))
        for d in deltas:
            assert (d.id, d.index) not in self.reasons, "a delta behind the last one"
            self.tokens[d.id, d.index] += d.token_ids
            if d.finish_reason:
                self.reasons[d.id, d.index] = d.finish_reason
        return deltas

    def drain(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work() and not self.pending:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")
