"""Prefixes: sequences with a common prefix share its blocks, and no others do. The fake runner reads its answers
through the block tables, so a block that is shared wrongly is a wrong token or a loud error."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.plan import StepResult
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, SamplingParams
from tests.examples import examples
from tests.sched.drive import Drive, adapter, adapter_pool, by_hand, request

EOS = frozenset({5})


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(ahead: bool = False, clock=None, **options) -> Drive:
    scheduling = {k: options.pop(k) for k in ("prefix_cache", "eviction") if k in options}
    fake = FakeRunner(**{"block_size": 8, "num_blocks": 100, **options})
    scheduler = Scheduler(fake.capacity, eos_ids=EOS, clock=clock or Clock(), adapters=adapter_pool(), **scheduling)
    return Drive(scheduler, fake, ahead)


def run(drive: Drive, *requests: Request) -> list[int]:
    """Runs them one after the other; returns how many tokens each found in the cache."""
    found = []
    for r in requests:
        before = drive.scheduler.cached_tokens
        drive.scheduler.add(r)
        drive.drain()
        found.append(drive.scheduler.cached_tokens - before)
        expected = by_hand(r, 256, 512, EOS)
        assert [drive.tokens[r.id, i] for i in range(r.params.n)] == expected
        drive.scheduler.check()
    return found


PROMPT = list(range(10, 60))


def test_a_prompt_sent_again_is_found_but_for_its_last_token():
    assert run(make(), request("a", PROMPT), request("b", PROMPT)) == [0, 49]


def test_no_more_than_the_prompt_is_reported_as_cached():
    """Ids that were streamed before a restart, or are forced, may be found too; usage counts the prompt's."""
    drive = make()
    run(drive, request("a", PROMPT, max_tokens=30))
    drive.scheduler.add(replace(request("b", PROMPT, max_tokens=30), resume_ids=(tuple(drive.tokens["a", 0][:20]),)))
    deltas = drive.step()
    assert drive.scheduler.cached_tokens == len(PROMPT) + 20 - 1
    assert [delta.cached_tokens for delta in deltas] == [len(PROMPT)]


def test_a_conversation_finds_its_earlier_turns():
    drive = make()
    first = request("a", PROMPT, ignore_eos=True)
    run(drive, first)
    answer = drive.tokens["a", 0]
    assert run(drive, request("b", [*PROMPT, *answer, 7, 8, 9])) == [len(PROMPT) + len(answer) - 1]


def test_a_branch_inside_a_block_copies_it():
    drive = make()
    assert run(drive, request("a", PROMPT), request("b", [*PROMPT[:21], 99, 98, 97])) == [0, 21]
    assert any(plan.copies for plan in drive.plans)


def test_answers_of_one_request_share_its_prompt():
    drive = make(max_rows=4)
    r = request("a", PROMPT, n=4, temperature=1.0, seed=3)
    assert run(drive, r) == [0], "nobody had computed it before"
    assert sum(w.count for plan in drive.plans for w in plan.works if w.start < 49) == 50


def test_a_request_waits_for_a_prefix_that_is_being_computed():
    drive = make(max_tokens_per_step=16)
    for i in range(3):
        drive.scheduler.add(request(str(i), [*PROMPT, i]))
    drive.drain()
    assert drive.scheduler.cached_tokens >= 2 * (len(PROMPT) - 4), "but for half a block at most"
    for i in range(3):
        assert [drive.tokens[str(i), 0]] == by_hand(request(str(i), [*PROMPT, i]), 256, 512, EOS)


def test_a_follower_continues_when_its_leader_is_aborted():
    drive = make(max_tokens_per_step=16)
    for i in range(2):
        drive.scheduler.add(request(str(i), [*PROMPT, i]))
    drive.step()
    (first,) = drive.scheduler.running
    (second,) = drive.scheduler.waiting
    assert second.shares_with and second.shares_with.seq is first
    drive.scheduler.abort(first.request.id)
    drive.step()
    assert drive.scheduler.running == [second] and second.shares_with is None
    drive.drain()
    assert [drive.tokens["1", 0]] == by_hand(second.request, 256, 512, EOS)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_a_request_without_a_common_prefix_does_not_wait(block_size):
    drive = make(block_size=block_size, num_blocks=400, max_tokens_per_step=256)
    prompts = [[10 + i, *PROMPT] for i in range(3)]
    for i, prompt in enumerate([*prompts, prompts[0]]):
        drive.scheduler.add(request(str(i), prompt))
    drive.step()
    assert [s.request.id for s in drive.scheduler.waiting] == ["3"], "it begins as the first one does"
    drive.drain()
    assert drive.scheduler.cached_tokens == len(PROMPT)
    for i, prompt in enumerate([*prompts, prompts[0]]):
        assert [drive.tokens[str(i), 0]] == by_hand(request(str(i), prompt), 256, 512, EOS)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_salt": "x"}, {"cache_salt": "y"}),
        ({"cache_salt": "x"}, {}),
        ({"adapters": (adapter("x"),)}, {}),
        ({"no_cache": True}, {}),
        ({}, {"no_cache": True}),
        ({"no_cache": True}, {"no_cache": True}),
    ],
)
def test_namespaces_do_not_meet(first, second):
    def of(id: str, **fields) -> Request:
        return Request(id, tuple(PROMPT), SamplingParams(max_tokens=3, seed=0), **fields)

    drive = make()
    assert run(drive, of("a", **first), of("b", **second)) == [0, 0]


def test_a_disabled_cache_keeps_no_blocks():
    drive = make(prefix_cache=False)
    assert run(drive, request("a", PROMPT, n=2), request("b", PROMPT)) == [0, 0]
    assert drive.scheduler.kv.tree.stats().nodes == 0 and drive.scheduler.kv.pools[0].free == 99


def test_outputs_of_prompt_rows_are_computed():
    drive = make()
    assert run(drive, request("a", PROMPT), request("b", PROMPT, prompt_logprobs=0)) == [0, 0]


def test_a_preempted_sequence_finds_its_computed_blocks():
    drive = make()
    drive.scheduler.add(request("a", PROMPT, max_tokens=20, ignore_eos=True))
    for _ in range(5):
        drive.step()
    drive.scheduler.preempt(drive.scheduler.running[0])
    done = len(drive.plans)
    drive.drain()
    assert drive.plans[done].num_tokens == 1, "it begins with the next token"
    assert [drive.tokens["a", 0]] == by_hand(request("a", PROMPT, max_tokens=20, ignore_eos=True), 256, 512)


def test_a_full_pool_gives_cached_blocks_back():
    drive = make(num_blocks=20)
    prompts = [[i, *range(100, 140)] for i in range(12)]
    assert run(drive, *(request(str(i), p) for i, p in enumerate(prompts))) == [0] * 12
    assert drive.scheduler.kv.tree.stats().evicted > 0 and drive.scheduler.preemptions == 0


def test_a_pinned_prefix_survives_later_requests_until_it_expires():
    clock = Clock()
    drive = make(num_blocks=20, clock=clock)

    def pinned(id: str, ttl: float | None) -> Request:
        return Request(id, tuple(PROMPT), SamplingParams(max_tokens=1, seed=0), cache_ttl=ttl)

    others = [request(f"o{i}", [200 + i, *range(100, 140)]) for i in range(12)]
    run(drive, pinned("a", 60.0), *others[:6])
    assert run(drive, pinned("b", None)) == [48]
    clock.now = 61.0
    run(drive, *others[6:])
    assert run(drive, pinned("c", None)) == [0]


def test_pins_never_block_other_requests():
    drive = make(num_blocks=20)
    for i in range(3):
        prompt = tuple([i] * 60)
        run(drive, Request(f"p{i}", prompt, SamplingParams(max_tokens=2, seed=0), cache_ttl=1e9))
    assert run(drive, request("big", [9] * 130)) == [0]


def test_a_lone_request_does_not_starve_for_its_own_pin():
    """Beyond a window, a sequence releases blocks that its pin keeps."""
    drive = make(window=20, block_size=4, num_blocks=9, max_tokens_per_step=1)
    run(drive, Request("a", tuple(PROMPT), SamplingParams(max_tokens=30, seed=0, ignore_eos=True), cache_ttl=1e9))
    assert drive.scheduler.preemptions == 0


def test_a_window_resumes_where_its_blocks_are():
    drive = make(window=20, num_blocks=40, max_model_len=300)
    long = [i % 250 for i in range(150)]
    assert run(drive, request("a", long), request("b", long), request("c", [*long, 1, 2]))[1:] == [149, 150]
    assert run(drive, request("d", [*long[:50], 251])) in ([50], [48], [0])


def test_planning_ahead_waits_for_blocks_that_a_window_releases():
    """Two planned chunks hold more blocks than one: a sequence that fits alone must not preempt itself for ever."""
    drive = make(True, window=20, num_blocks=14, block_size=4, max_rows=3, max_tokens_per_step=23)
    assert run(drive, request("a", [i % 250 for i in range(57)], max_tokens=3)) == [0]
    assert drive.scheduler.preemptions == 0


@pytest.mark.parametrize("hits", [0, 1])
def test_eviction_by_priority_is_by_that_of_requests(hits):
    """The most urgent prefix stays longest, regardless of recency and number of hits."""
    drive = make(num_blocks=30, eviction="priority")  # 29 of 8 tokens, for four prompts of 7 each

    def ask(name: str, text: int, priority: int) -> int:
        (found,) = run(drive, replace(request(name, [text] * 50, max_tokens=4), priority=priority))
        return found

    for text, priority in ((1, -1), (2, 0), (3, 1), (4, 2)):
        for turn in range(1 + hits):
            ask(f"{text} {turn}", text, priority)
    ask("strange", 9, -1)
    ask("another", 8, -1)
    assert [ask(f"{text} again", text, -1) > 40 for text in (1, 2)] == [True, True]
    assert ask("4 again", 4, -1) == 0


workloads = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(0, 12), st.integers(1, 12), st.integers(1, 3)),
    min_size=1,
    max_size=12,
)


@examples(60)
@given(
    workloads,
    st.booleans(),
    st.sampled_from([4, 8, 16]),
    st.integers(14, 60),
    st.sampled_from([0, 20]),
    st.sampled_from(["lru", "lfu", "fifo", "priority"]),
    st.integers(0, 2**20),
)
def test_whatever_is_shared_the_answers_stay(work, ahead, block_size, num_blocks, window, eviction, seed):
    """Prompts that begin with a piece of one of five texts, in any order, with preemptions."""
    rng = random.Random(seed)
    texts = [[rng.randrange(256) for _ in range(64)] for _ in range(5)]
    drive = make(ahead, block_size=block_size, num_blocks=num_blocks, window=window, eviction=eviction,
                 max_rows=3, max_tokens_per_step=23)  # fmt: skip
    requests = []
    for i, (text, cut, tail, max_tokens, n) in enumerate(work):
        prompt = texts[text][:cut] + [rng.randrange(256) for _ in range(tail)]
        requests.append(request(str(i), prompt, max_tokens=max_tokens, n=n, temperature=1.0, seed=i))
    fits = [r for r in requests if drive.scheduler.kv.can_ever_hold(len(r.prompt_ids) + r.params.max_tokens, 23)]
    for r in fits:
        drive.scheduler.add(r)
        drive.step()
        if drive.scheduler.running and rng.random() < 0.2:
            drive.scheduler.preempt(rng.choice(drive.scheduler.running))
        drive.scheduler.check()
    drive.drain()
    for r in fits:
        assert [drive.tokens[r.id, i] for i in range(r.params.n)] == by_hand(r, 256, 512, EOS)
    drive.scheduler.check()
    assert drive.scheduler.kv.used == 0


def test_a_retracted_step_leaves_no_uncopied_blocks_in_the_tree():
    """It would have copied the beginning of a block, which was evicted before the step ran."""
    drive = make()
    run(drive, request("a", PROMPT))
    scheduler, branch = drive.scheduler, request("b", [*PROMPT[:21], 99, 98, 97])
    scheduler.add(branch)
    plan = scheduler.plan()
    assert plan and plan.copies
    scheduler.kv.tree.evict(0, 100)
    rest = scheduler.retract(plan)
    drive.runner.execute(rest)
    scheduler.commit(rest, StepResult(rest.step))
    drive.drain()
    assert [drive.tokens["b", 0]] == by_hand(branch, 256, 512, EOS)
    scheduler.check()


def test_pins_do_not_block_a_request_that_must_run_alone():
    drive = make(num_blocks=20)
    run(drive, Request("p", tuple([1] * 60), SamplingParams(max_tokens=2, seed=0), cache_ttl=1e9))
    big = request("big", [9] * 130)
    drive.scheduler.add(big)
    drive.scheduler.waiting[0].suspect = 130  # until it has passed there
    drive.drain()
    assert [drive.tokens["big", 0]] == by_hand(big, 256, 512, EOS)
    drive.scheduler.check()
