"""The scheduler over the FakeRunner: the same tokens whatever else happens, and nothing leaks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest, QueueFull
from kvasir.plan import unpack_ids
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import FinishReason, Request, SamplingParams, Task
from tests.examples import examples
from tests.sched.drive import Drive, by_hand, request

EOS = frozenset({5, 77})


def make(ahead: bool = False, max_chunk: int = 2**31, max_waiting: int = 1024, **runner) -> Drive:
    fake = FakeRunner(**runner)
    return Drive(Scheduler(fake.capacity, eos_ids=EOS, max_chunk=max_chunk, max_waiting=max_waiting), fake, ahead)


def expect(drive: Drive, req) -> None:
    cap = drive.runner.capacity
    for i, tokens in enumerate(by_hand(req, cap.vocab_size, cap.max_model_len, EOS)):
        assert drive.tokens[req.id, i] == tokens, (req, i)
        stopped = tokens[-1] in EOS and not req.params.ignore_eos
        assert drive.reasons[req.id, i] is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_one_request_alone():
    drive = make()
    req = request("a", [1, 2, 3], max_tokens=5)
    drive.scheduler.add(req)
    drive.drain()
    expect(drive, req)
    drive.scheduler.check()


def test_a_chunk_never_exceeds_the_budget_and_decodes_continue():
    drive = make(max_tokens_per_step=16)
    drive.scheduler.add(request("short", [1], max_tokens=40, ignore_eos=True))
    drive.step()
    drive.scheduler.add(request("long", list(range(100)), max_tokens=3))
    drive.drain()
    assert all(p.num_tokens <= 16 for p in drive.plans)
    mixed = [p for p in drive.plans if len(p.works) == 2]
    assert len(mixed) >= 6, "the long prefill ran in chunks beside the short one's decode"


def test_values_travel_once():
    drive = make()
    drive.scheduler.add(request("a", [9, 8, 7], max_tokens=6, ignore_eos=True))
    drive.drain()
    joins = [j for p in drive.plans for j in p.joined]
    assert [unpack_ids(j.ids) for j in joins] == [[9, 8, 7]]
    assert all(not w.appended for p in drive.plans for w in p.works)


def test_answers_share_the_prompts_blocks():
    drive = make(block_size=8, num_blocks=40)
    drive.scheduler.add(request("a", list(range(20)), n=4, seed=1, temperature=1.0, max_tokens=4, ignore_eos=True))
    drive.step()
    first = drive.scheduler.kv.used
    drive.step()
    copies = [c for p in drive.plans for c in p.copies]
    assert first == 3 and drive.scheduler.kv.used == 3 + 3, "two full blocks shared, each sibling owns a third"
    assert len(copies) == 3
    drive.drain()
    drive.scheduler.check()


def test_requests_that_can_never_fit_are_refused():
    scheduler = make(num_blocks=5, block_size=16, max_model_len=512).scheduler
    with pytest.raises(InvalidRequest, match="never fit"):
        scheduler.add(request("a", [1] * 60, max_tokens=60))
    with pytest.raises(InvalidRequest, match="empty"):
        scheduler.add(request("b", []))
    with pytest.raises(InvalidRequest, match="context"):
        scheduler.add(request("c", [1] * 512))
    with pytest.raises(InvalidRequest, match="token id 256"):
        scheduler.add(request("d", [256]))
    assert not scheduler.has_work()


def test_an_embedding_may_fill_the_memory():
    drive = make(num_blocks=5, block_size=16)
    drive.scheduler.add(Request("a", tuple(range(64)), SamplingParams(max_tokens=8, seed=0), task=Task.EMBED))
    drive.drain(10)
    assert drive.reasons["a", 0] is FinishReason.STOP


def embedding(id: str, prompt: list[int], **fields) -> Request:
    return Request(id, tuple(prompt), SamplingParams(max_tokens=1, seed=0), task=Task.EMBED, **fields)


@pytest.mark.parametrize("ahead", [False, True])
def test_embeddings_retain_nothing_and_displace_nothing(ahead):
    drive = make(ahead, num_blocks=14, block_size=8, max_chunk=16, max_rows=1)
    prompt = list(range(40))
    drive.scheduler.add(request("answer", prompt, max_tokens=2, ignore_eos=True))
    drive.drain()
    kept = drive.scheduler.kv.used
    for i in range(6):
        drive.scheduler.add(embedding(f"text {i}", [100 + i] * 40, cache_ttl=60.0))
    drive.drain()
    assert all(drive.reasons[f"text {i}", 0] is FinishReason.STOP for i in range(6))
    assert drive.scheduler.kv.used == kept
    drive.scheduler.add(request("again", prompt, max_tokens=2, ignore_eos=True))
    drive.drain()
    assert drive.scheduler.cached_tokens >= 39
    drive.scheduler.check()


def test_embeddings_are_computed_shortest_first():
    drive = make(max_rows=1, num_blocks=40)
    lengths = {"a": 33, "b": 60, "c": 5, "d": 40, "e": 50}
    for id, length in lengths.items():
        drive.scheduler.add(embedding(id, [7] * length))
    drive.drain()
    assert [id for id, _ in drive.reasons] == sorted(lengths, key=lambda id: lengths[id])


def test_the_queue_has_a_bound():
    scheduler = make(max_waiting=4).scheduler
    scheduler.add(request("a", [1], n=3))
    with pytest.raises(QueueFull):
        scheduler.add(request("b", [1], n=2))
    scheduler.add(request("c", [1]))
    scheduler.add(replace(request("accepted before", [1], n=2), resume_ids=((), (7,))))


def test_priority_goes_first():
    drive = make(max_rows=1)
    drive.scheduler.add(replace(request("late", [1], max_tokens=2, ignore_eos=True), priority=1))
    drive.scheduler.add(replace(request("soon", [1], max_tokens=2, ignore_eos=True), priority=0))
    drive.drain()
    assert list(drive.reasons) == [("soon", 0), ("late", 0)]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_window_returns_its_blocks(ahead):
    drive = make(ahead, max_chunk=8, window=20, block_size=8, num_blocks=12, max_model_len=300)
    req = request("a", list(range(30)), max_tokens=200, ignore_eos=True)
    drive.scheduler.add(req)
    most = 0
    while drive.scheduler.has_work() or drive.pending:
        drive.step()
        most = max(most, drive.scheduler.kv.used)
    assert most <= 5, "20 tokens of window never hold more than 4 blocks, and one that is being filled"
    expect(drive, req)
    drive.scheduler.check()


def test_more_decodes_than_budget_starve_no_request():
    drive = make(max_rows=8, max_tokens_per_step=3)
    requests = [request(str(i), [i], max_tokens=5) for i in range(8)]
    for r in requests:
        drive.scheduler.add(r)
    drive.drain()
    for r in requests:
        expect(drive, r)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_failing_row_ends_alone(overlaps):
    def fault(plan):
        if any(4 in unpack_ids(j.ids) for j in plan.joined):
            raise RuntimeError("poison")

    from kvasir.engine.core import EngineCore

    fake = FakeRunner(fault=fault, overlaps=overlaps)
    core = EngineCore(fake, Scheduler(fake.capacity, eos_ids=EOS))
    requests = [request(str(i), [10 + i], max_tokens=6, ignore_eos=True) for i in range(5)]
    poison = request("p", [4, 4], max_tokens=6)
    for r in [*requests[:3], poison, *requests[3:]]:
        core.add(r)
    tokens, reasons = {}, {}
    for _ in range(200):
        for d in core.step():
            tokens.setdefault(d.id, []).extend(d.token_ids)
            if d.finish_reason:
                reasons[d.id] = d.finish_reason
    assert reasons.pop("p") is FinishReason.ERROR
    assert set(reasons.values()) == {FinishReason.LENGTH} and len(reasons) == 5
    for r in requests:
        assert [tokens[r.id]] == by_hand(r, 256, 512)
    core.scheduler.check()


workloads = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.lists(st.integers(0, 255), min_size=1, max_size=60),
        st.integers(1, 25),  # max_tokens
        st.integers(1, 4),  # n
        st.integers(0, 2),  # priority
        st.one_of(st.none(), st.integers(0, 30)),  # step of abort
    ),
    min_size=1,
    max_size=8,
)


@examples(60)
@given(
    workloads,
    st.booleans(),
    st.sampled_from([8, 16]),
    st.integers(12, 40),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([0, 24]),
    st.integers(0, 2**30),
)
def test_any_workload_gives_the_answers_of_each_request_alone(
    workload, ahead, block_size, num_blocks, rows, budget, chunk, window, seed
):
    import random
    from dataclasses import replace

    rng = random.Random(seed)
    drive = make(
        ahead, chunk, num_blocks=num_blocks, block_size=block_size, max_rows=rows,
        max_tokens_per_step=budget, max_model_len=88, window=window,
    )  # fmt: skip
    requests = {}
    for step in range(200):
        for i, (arrival, prompt, most, n, priority, abort) in enumerate(workload):
            if arrival == step:
                req = request(str(i), prompt, max_tokens=most, n=n, temperature=1.0, seed=seed + i)
                req = replace(req, priority=priority)
                try:
                    drive.scheduler.add(req)
                except InvalidRequest:
                    continue
                requests[str(i)] = (req, abort)
            if abort == step and str(i) in requests:
                drive.scheduler.abort(str(i), index=None)
        if drive.scheduler.running and rng.random() < 0.1:
            drive.scheduler.preempt(rng.choice(drive.scheduler.running))
        drive.step()
        drive.scheduler.check()
    drive.drain()
    drive.scheduler.check()
    assert drive.scheduler.kv.used == 0
    for req, abort in requests.values():
        if abort is None:
            expect(drive, req)
