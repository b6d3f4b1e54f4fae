"""Blocks sent from one engine to another, over the fake runner, whose answers are read from the cache: a block that
came with another content is a wrong token or a loud error."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.engine.core import EngineCore
from kvasir.kv.tiers.block import GroupFacts, StoreFacts
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.runner.fake import FakeRunner
from kvasir.sched.scheduler import Scheduler
from kvasir.types import Request, Transfer
from tests.kv._transfer import exchange
from tests.sched.drive import adapter_pool, by_hand, request

SIZE = 8
PROMPT = list(range(10, 90))  # ten blocks


class Engines:
    """Two engines, of which one computes prompts and the other one continues them. push: whether the first one
    connects, or the second one."""

    def __init__(self, stack: ExitStack, folder: Path, push: bool, **options):
        self.push = push
        where = folder / "run" / "blocks"
        self.address = str(where)
        sizes = [g.kind for g in FakeRunner(block_size=SIZE, **options).capacity.groups]
        facts = StoreFacts(
            "fake", "1", SIZE, tuple(GroupFacts("ids", 8 * (SIZE + kind.keeps_starts)) for kind in sizes)
        )
        self.first = stack.enter_context(exchange(None if push else where, *[where] * push, facts=facts))
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


@pytest.fixture(params=[True, False], ids=["push", "fetch"])
def engines(tmp_path, request) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(stack, tmp_path, request.param)


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
