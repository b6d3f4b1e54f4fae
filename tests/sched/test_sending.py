"""Blocks sent from one engine to another, over the fake runner, whose answers are read from the cache: a block that
came with another content is a wrong token or a loud error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.caches import State, attention
from kvasir.engine.core import EngineCore
from kvasir.errors import InvalidRequest
from kvasir.kv.tiers.block import GroupFacts, StoreFacts
from kvasir.kv.transfer import inbox
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.runner.fake import FakeRunner
from kvasir.sched import sending
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, Transfer
from tests.kv._transfer import exchange
from tests.kv.chunked import Chunked
from tests.sched.drive import adapter_pool, by_hand, request

SIZE = 8
PROMPT = list(range(10, 90))  # ten blocks


class Engines:
    """Two engines, of which one computes prompts and the other one continues them. push: whether the first one
    connects, or the second one."""

    def __init__(self, stack: ExitStack, folder: Path, push: bool, first: dict | None = None, **options):
        self.push = push
        where = folder / "run" / "blocks"
        self.address = str(where)
        sizes = [g.kind for g in FakeRunner(block_size=SIZE, **options).capacity.groups]
        facts = StoreFacts(
            "fake", "1", SIZE, tuple(GroupFacts("ids", 8 * (SIZE + kind.keeps_starts)) for kind in sizes)
        )
        self.first = stack.enter_context(
            exchange(None if push else where, *[where] * push, facts=facts, **(first or {}))
        )
        self.second = stack.enter_context(exchange(where if push else None, *[where] * (not push), facts=facts))
        self.prefill, self.decode = core_of(self.first, **options), core_of(self.second, **options)

    def pair(self, name: str, prompt: list[int], seconds: float = 30.0, **more) -> tuple[Request, Request]:
        """A request for the first token, and the request for all of them that takes its blocks."""
        whole = request(name, prompt, **more)
        to, source = (self.address, "") if self.push else ("", self.address)
        one = replace(whole, params=replace(whole.params, max_tokens=1), sends=Transfer(name, to, seconds))
        return one, replace(whole, takes=Transfer(name, source, seconds))


def core_of(blocks: BlockExchange, **options) -> EngineCore:
    runner = FakeRunner(**{"block_size": SIZE, "num_blocks": 40, "max_model_len": 512, **options})
    scheduler = Scheduler(
        runner.capacity, tier=blocks.inbox, exchange=blocks, adapters=adapter_pool(), tier_bytes=1 << 20
    )
    return EngineCore(runner, scheduler)


def run(core: EngineCore, *requests: Request) -> dict[str, list[list[int]]]:
    """All of them at once, to their ends; the tokens are those one can compute by hand."""
    tokens = {r.id: [list(ids) for ids in r.resume_ids] or [[] for _ in range(r.params.n)] for r in requests}
    for r in requests:
        core.add(r)
    deadline = time.monotonic() + 60
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
            tokens[delta.id][delta.index] += delta.token_ids
        core.check()
        assert time.monotonic() < deadline, "no end"
    for r in requests:
        assert tokens[r.id] == by_hand(r, core.info.vocab_size, core.info.max_model_len)
    return tokens


WAYS = {"push": (True, False), "fetch": (False, False), "push pieces": (True, True), "fetch pieces": (False, True)}


@pytest.fixture(params=WAYS.values(), ids=[*WAYS])
def engines(tmp_path, request) -> Iterator[Engines]:
    with ExitStack() as stack:
        push, grows = request.param
        yield Engines(stack, tmp_path, push, grows=grows)


def test_the_second_engine_computes_only_the_end(engines):
    one, whole = engines.pair("a", PROMPT)
    (first,) = run(engines.prefill, one)["a"]
    (tokens,) = run(engines.decode, whole)["a"]
    assert tokens[:1] == first
    assert engines.decode.stats().tier_loaded_tokens == 9 * SIZE  # a token of the last block must be computed


def test_a_request_waits_for_blocks_on_their_way(engines):
    one, whole = engines.pair("a", PROMPT)
    engines.decode.add(whole)
    for _ in range(5):
        assert engines.decode.step() == []
    run(engines.prefill, one)
    tokens = []
    while engines.decode.has_work():
        tokens += [t for delta in engines.decode.step() for t in delta.token_ids]
    assert [tokens] == by_hand(whole, 256, 512)
    assert engines.decode.stats().tier_loaded_tokens == 9 * SIZE


KINDS = {
    "window": (attention(1, 1, 20),),
    "full and window": (attention(1, 1), attention(1, 1, 12)),
    "chunked": (attention(1, 1), Chunked(1, 1, chunk=24)),
    "state": (attention(1, 1), State((1,), 1)),
}


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 40, 64, 77, 80])
@pytest.mark.parametrize("resumed", [False, True], ids=["from its prompt", "from its first token"])
@pytest.mark.parametrize("grows", [False, True], ids=["blocks", "pieces"])
def test_all_kinds_of_caches_continue(tmp_path, kinds, length, resumed, grows):
    """Whether the second engine samples the first token itself or gets it, the last full block that it can use is
    there."""
    with ExitStack() as stack:
        engines = Engines(stack, tmp_path, True, kinds=kinds, grows=grows)
        one, whole = engines.pair("a", PROMPT[:length])
        (first,) = run(engines.prefill, one)["a"]
        if resumed:
            whole = replace(whole, resume_ids=(tuple(first),), resume_carries=(b"",))
        run(engines.decode, whole)
        known = length + resumed
        assert engines.decode.stats().tier_loaded_tokens == min(known - 1, length) // SIZE * SIZE


def test_choices_share_the_blocks(engines):
    one, whole = engines.pair("a", PROMPT, n=4, temperature=1.0, seed=3)
    run(engines.prefill, replace(one, params=replace(one.params, n=1)))
    run(engines.decode, whole)
    assert engines.decode.stats().tier_loaded_tokens == 9 * SIZE
    assert engines.second.inbox.stats().num_bytes == 0


def test_cached_blocks_are_sent_too(engines):
    run(engines.prefill, request("before", PROMPT))
    one, whole = engines.pair("a", PROMPT)
    run(engines.prefill, one)
    run(engines.decode, whole)
    assert engines.decode.stats().tier_loaded_tokens == 9 * SIZE


def test_many_at_once_with_neighbours(engines):
    pairs = [engines.pair(f"r{i}", [i, *PROMPT[: 10 + 7 * i]], temperature=1.0, seed=i) for i in range(8)]
    run(engines.prefill, *(one for one, _ in pairs), request("other", PROMPT[::-1]))
    run(engines.decode, *(whole for _, whole in pairs), request("another", PROMPT[5:]))
    assert engines.decode.stats().tier_loaded_tokens >= sum((10 + 7 * i) // SIZE * SIZE for i in range(8))


def test_exports_are_spread_over_steps_as_there_is_room(tmp_path, monkeypatch):
    """No step exports more than its bound, and none waits for the receiver."""
    size, most = SIZE * 8, []
    monkeypatch.setattr(sending, "EXPORT_BYTES", 2 * size)
    with ExitStack() as stack:
        engines = Engines(stack, tmp_path, False, first={"max_bytes": 4 * size})
        engines.prefill.plan_listener = lambda plan: most.append(len(plan.saves))
        one, whole = engines.pair("a", PROMPT)
        engines.decode.add(whole)
        engines.prefill.add(one)
        tokens: list[int] = []
        while engines.prefill.has_work() or engines.decode.has_work():
            engines.prefill.step()
            tokens += [t for delta in engines.decode.step() for t in delta.token_ids]
        assert [tokens] == by_hand(whole, 256, 512)
        assert max(most) == 2 and sum(most) == 10
        assert engines.decode.stats().tier_loaded_tokens == 9 * SIZE


@pytest.mark.parametrize("change", [{"no_cache": True}, {"cache_salt": "other"}])
def test_what_is_not_shared_is_not_taken(engines, change):
    one, whole = engines.pair("a", PROMPT)
    run(engines.prefill, one)
    run(engines.decode, replace(whole, **change))
    assert engines.decode.stats().tier_loaded_tokens == 0


def test_private_blocks_are_not_sent_and_not_waited_for(engines):
    one, whole = engines.pair("a", PROMPT)
    run(engines.prefill, replace(one, no_cache=True))
    run(engines.decode, whole)
    assert engines.second.inbox.stats().saves == {} and engines.decode.stats().tier_loaded_tokens == 0


def test_salted_blocks_are_sent_to_the_same_salt(engines):
    one, whole = engines.pair("a", PROMPT)
    run(engines.prefill, replace(one, cache_salt="ours"))
    run(engines.decode, replace(whole, cache_salt="ours"))
    assert engines.decode.stats().tier_loaded_tokens == 9 * SIZE


def test_what_a_step_fills_is_sent_by_the_step(tmp_path):
    """No step exports blocks, and what does not fit into the memory for blocks is exported later."""
    most: list[int] = []
    for memory, exports in ((1 << 20, 0), (4 * SIZE * 8, 6)):
        with ExitStack() as stack:
            engines = Engines(stack, tmp_path / str(memory), False, first={"max_bytes": memory}, grows=True)
            most.clear()
            engines.prefill.plan_listener = lambda plan: most.append(len(plan.saves))
            one, whole = engines.pair("a", PROMPT)
            engines.prefill.add(one)
            engines.prefill.step()
            engines.decode.add(whole)
            tokens: list[int] = []
            while engines.prefill.has_work() or engines.decode.has_work():
                engines.prefill.step()
                tokens += [t for delta in engines.decode.step() for t in delta.token_ids]
            assert [tokens] == by_hand(whole, 256, 512)
            assert sum(most) <= exports and engines.decode.stats().tier_loaded_tokens == 9 * SIZE
            assert engines.first.outbox.stats.grown == 10 - sum(most)


def test_a_step_reads_no_more_in_pieces_than_its_bound(tmp_path, monkeypatch):
    """Of all prompts that it computes. The rest is exported by later steps, and all of it arrives."""
    size, most = SIZE * 8, []
    monkeypatch.setattr(sending, "GROWN_BYTES", 3 * size)
    with ExitStack() as stack:
        engines = Engines(stack, tmp_path, True, grows=True)
        engines.prefill.plan_listener = lambda plan: most.append(sum(len(work.grows) for work in plan.work))
        pairs = [engines.pair(name, [i, *PROMPT[:31]]) for i, name in enumerate("ab")]
        run(engines.prefill, *(one for one, _ in pairs))
        run(engines.decode, *(whole for _, whole in pairs))
        assert max(most) == 3 and engines.first.outbox.stats.grown == sum(most) < 8
        assert engines.decode.stats().tier_loaded_tokens == 2 * 3 * SIZE


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("grows", [False, True], ids=["blocks", "pieces"])
def test_a_failed_step_is_sent_again(tmp_path, at, grows):
    """The blocks of a step that raised are computed and exported again."""
    count = [0]

    def fault(plan) -> None:
        count[0] += 1
        if count[0] == at:
            raise RuntimeError("a step fails")

    with ExitStack() as stack:
        engines = Engines(stack, tmp_path, True, max_tokens_per_step=24, fault=fault, grows=grows)
        other, (one, whole) = request("other", PROMPT[::-1]), engines.pair("a", PROMPT)
        for r in (one, other):
            engines.prefill.add(r)
        while engines.prefill.has_work():
            engines.prefill.step()
            engines.prefill.check()
        count[0] = 99
        run(engines.decode, whole)


def test_an_aborted_request_sends_what_is_computed(engines):
    one, whole = engines.pair("a", PROMPT)
    engines.prefill.add(one)
    engines.prefill.step()  # 64 of 80 tokens
    engines.prefill.abort("a")
    while engines.prefill.has_work():
        engines.prefill.step()
    run(engines.decode, whole)
    assert engines.decode.stats().tier_loaded_tokens == 64


def test_a_request_whose_blocks_never_come_is_computed(engines, monkeypatch):
    monkeypatch.setattr(inbox, "STALL_SECONDS", 0.2)
    _, whole = engines.pair("a", PROMPT)
    run(engines.decode, whole)
    assert engines.decode.stats().tier_loaded_tokens == 0


@pytest.mark.parametrize("sends", [True, False])
def test_engines_without_others_refuse(sends):
    runner = FakeRunner(block_size=SIZE)
    core = EngineCore(runner, Scheduler(runner.capacity))
    given = request("a", PROMPT)
    with pytest.raises(InvalidRequest, match="exchanges no blocks"):
        core.add(replace(given, sends=Transfer("x")) if sends else replace(given, takes=Transfer("x")))
    assert not core.has_work()
