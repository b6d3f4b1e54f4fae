"""Engines with drafters: the tokens are those of an engine without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError, InvalidRequest, UnsupportedModel
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.spec.drafter import Speculator
from kvasir.spec.pace import StepTimes
from kvasir.speculation import Drafters, Speculation, parse, wanted
from kvasir.types import Request, SamplingParams, each_delta

PROMPTS = (range(20, 60), range(100, 180, 3), [5, 6, 7, 8] * 6)


def core_of(speculate: str) -> EngineCore:
    options = EngineOptions("kvasir-mini", threads=1, num_blocks=64, max_model_len=512, speculate=speculate)
    core = build_core(options)
    if core.scheduler.drafter:
        core.scheduler.drafter.times = core.scheduler.drafter.rounds = Free()  # type: ignore[attr-defined]
    return core


class Free(StepTimes):
    """Rows and guesses cost nothing, so all that is guessed is checked."""

    def note(self, rows: int, seconds: float) -> None:
        pass

    def of(self, rows: int) -> float:
        return 1e-3


@pytest.fixture(scope="module")
def plain() -> Iterator[EngineCore]:
    core = core_of("off")
    yield core
    core.close()


def requests(**more) -> list[Request]:
    def ask(i: int, temperature: float) -> Request:
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True, logprobs=1)
        return Request(f"{i}-{temperature}", tuple(PROMPTS[i]), params, **more)

    return [ask(i, temperature) for i in range(len(PROMPTS)) for temperature in (0.0, 1.0)]


def answers(core: EngineCore, asked: list[Request]) -> dict[str, tuple]:
    for request in asked:
        core.add(request)
    found: dict[str, tuple] = {}
    while core.has_work():
        for delta in each_delta(core.advance()):
            ids, entries, _ = found.get(delta.id, ((), (), None))
            found[delta.id] = (*ids, *delta.token_ids), (*entries, *delta.logprobs), delta.finish_reason
    core.check()
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("speculate", ["auto", "ngram", "draft=kvasir-mini", "suffix,draft=kvasir-mini"])
def test_answers_are_the_same(plain, speculate):
    core, expected = core_of(speculate), answers(plain, requests())
    try:
        for _ in range(2):
            assert answers(core, requests()) == expected
        assert core.scheduler.accepted_tokens > 0
    finally:
        core.close()


def test_a_model_drafts_for_itself_almost_without_error():
    """At every temperature: both draw with the same noise. Only the ids after a forced end of a draft are missing."""
    core = core_of("draft=kvasir-mini")
    try:
        answers(core, requests())
        scheduler = core.scheduler
        assert scheduler.accepted_tokens == scheduler.drafted_tokens > 100
        assert core.steps < 40
    finally:
        core.close()


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_drafter_learns_while_a_step_is_computed_or_nothing_is(overlaps):
    """So ids of ended sequences are never indexed between two steps of an engine that overlaps."""
    drafter = Speculator(("suffix",))
    fake = FakeRunner(overlaps=overlaps, vocab_size=500, num_blocks=200, max_model_len=512)
    core = EngineCore(fake, Scheduler(fake.capacity, drafter=drafter))
    computing, learnt = [], {"meanwhile": 0, "idle": 0, "between": 0}
    execute, sample, learn = fake.execute, fake.sample, drafter.learn

    def started(plan):
        computing.append(plan)
        return execute(plan)

    def ended(*args):
        computing.pop(0)
        return sample(*args)

    def learning(most):
        found = learn(most)
        when = "meanwhile" if computing else "between" if core.scheduler.has_work() else "idle"
        learnt[when] += found
        return found

    fake.execute, fake.sample, drafter.learn = started, ended, learning  # type: ignore[method-assign]
    for i in range(6):
        core.add(Request(str(i), (i, 2, 3), SamplingParams(temperature=0.0, max_tokens=100 + 10 * i, ignore_eos=True)))
    while core.has_work():
        core.advance()
    core.close()
    assert sum(learnt.values()) == sum(100 + 10 * i for i in range(6))
    assert learnt["meanwhile"] > 200 if overlaps else not learnt["meanwhile"]
    assert not (overlaps and learnt["between"])


def test_a_request_may_leave_out_a_drafter(plain):
    core, asked = core_of("draft=kvasir-mini"), requests(speculation=Speculation(("ngram",)))
    try:
        assert answers(core, asked) == answers(plain, asked)
        assert core.scheduler.drafted_tokens == 0
    finally:
        core.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("off", Drafters()),
        ("auto", Drafters(("ngram", "suffix"))),
        ("ngram", Drafters(("ngram",))),
        ("suffix, draft=a/b", Drafters(("suffix", "draft"), "a/b")),
        ("eagle3=x", Drafters(("eagle3",), "x")),
        ("dflash=x", Drafters(("dflash",), "x")),
        ("mtp", Drafters(("mtp",))),
    ],
)
def test_drafters_are_named(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "on", "draft", "ngram=3", "mtp,draft=x", "ngram,ngram", "off,ngram", "eagle3="])
def test_other_names_are_refused(text):
    with pytest.raises(ConfigError, match=r"specul|drafter"):
        parse(text)


def test_requests_name_drafters():
    assert wanted({"method": "off"}) == Speculation(())
    assert wanted({"method": ["ngram", "mtp"], "num_speculative_tokens": 3}) == Speculation(("ngram", "mtp"), 3)
    assert wanted({}) == Speculation()
    for bad in ("off", {"method": "fast"}, {"k": 1}, {"num_speculative_tokens": True}, {"num_speculative_tokens": -1}):
        with pytest.raises(InvalidRequest, match="speculati"):
            wanted(bad)


def test_a_drafter_that_the_model_lacks_is_refused():
    with pytest.raises(UnsupportedModel, match="multi-token"):
        build_core(EngineOptions("kvasir-mini", speculate="mtp"))
