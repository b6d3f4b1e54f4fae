"""Two engines: the first computes prompts and first tokens, the second goes on; the answers are those of one engine,
bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvasir.engine.core import EngineCore
from kvasir.engine.journal import Journal
from kvasir.errors import ConfigError
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.types import Request, Transfer
from kvasir.weights.find import ASSETS
from tests.engine.cores import core_of, random_model
from tests.engine.test_tier_models import needs_native
from tests.kv._tiers import until
from tests.oracle import Answer, Answers, mixed_requests, plain, same


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def exchange_of(core: EngineCore) -> BlockExchange:
    found = core.scheduler.tiering.exchange
    assert found
    return found


@contextmanager
def two(model: str, address: str, others: str = "", **options) -> Iterator[tuple[EngineCore, EngineCore]]:
    """An engine that computes prompts, and one that takes their blocks at an address. others: its model."""
    options = {"block_size": 16, "threads": 1, **options}
    first = core_of(model, role="prefill", transfer_peer=[address], **options)
    second = core_of(others or model, role="decode", transfer_listen=address, **options)
    try:
        until(lambda: exchange_of(first).ready and exchange_of(second).ready)
        yield first, second
    finally:
        first.close()
        second.close()


def handed_over(first: EngineCore, second: EngineCore, requests: Sequence[Request], address: str) -> Answers:
    """The answers whose first tokens come from the first engine, and all others from the second."""
    journal, answers = Journal(), {(r.id, i): Answer() for r in requests for i in range(r.params.n)}

    def take(core: EngineCore, ends: bool) -> None:
        for delta in core.step():
            if journal.take(delta):
                answers[delta.id, delta.index].take(delta)
                if ends and not delta.finish_reason:
                    core.abort(delta.id, delta.index)

    for request in requests:
        journal.add(replace(request, sends=Transfer(request.id, address)))
    for request in journal.to_send():
        first.add(request)
    while first.has_work():
        take(first, ends=True)
    for entry in journal.entries.values():
        entry.returned = True
        row = entry.to_send(entry.arrived)
        second.add(replace(row, sends=None, takes=Transfer(row.id)))
    while second.has_work():
        take(second, ends=False)
    first.check()
    second.check()
    return answers


@pytest.fixture
def address(tmp_path) -> str:
    return str(tmp_path / "run" / "blocks")


@pytest.mark.parametrize(
    ("model", "executor"),
    [
        pytest.param("kvasir-mini", "auto", marks=needs_native),
        pytest.param("gemma3", "program", marks=[needs_native, pytest.mark.slow]),
        pytest.param("qwen3-next", "program", marks=[needs_native, pytest.mark.slow]),
        pytest.param("llama", "eager", marks=pytest.mark.slow),
        pytest.param("mistral", "eager", marks=pytest.mark.slow),
    ],
)
def test_answers_of_two_engines_are_those_of_one(tmp_path, address, model, executor):
    if model != "kvasir-mini":
        pytest.importorskip("torch")
        model = random_model(model, tmp_path)
    with two(model, address, executor=executor) as (first, second):
        vocab = first.info.vocab_size
        requests = mixed_requests(vocab, 400, longest=150, count=12)
        expected = plain(core_of(model, block_size=16, threads=1, executor=executor), requests)
        same(expected, handed_over(first, second, requests, address))
        prompts = sum(len(r.prompt_ids) // 16 * 16 for r in requests if not r.params.prompt_logprobs)
        assert second.stats().tier_loaded_tokens >= 0.8 * prompts
        until(lambda: exchange_of(first).outbox.num_bytes == 0)
        sent = first.stats()
        windows = any(
            group.kind.forgets for group in first.scheduler.capacity.groups
        )  # only their last blocks are sent
        assert sent.blocks_sent["sent"] * 16 >= (1 if windows else prompts) and sent.blocks_sent_bytes > 0
        grown = exchange_of(first).outbox.stats.grown
        assert bool(grown) == bool(first.runner.capacity.grows), "blocks are sent in pieces where the executor can"
        assert model != "kvasir-mini" or grown in (0, sent.blocks_sent["sent"]), "without windows, all of them"


@needs_native
def test_what_is_read_during_a_step_is_what_the_step_computes(address):
    """Layer by layer: each piece comes once its layers are computed, and lies where it says."""
    with two("kvasir-mini", address, overlap=True, max_num_batched_tokens=64) as (first, _):
        pieces: dict[tuple[int, int, int], dict[int, bytes]] = {}
        whole: list[tuple[int, int, int]] = []
        wrong: list[tuple[int, int, int]] = []
        cache = getattr(first.runner, "cache")  # noqa: B009

        def take(step: int, group: int, block: int, offset: int, payload: memoryview | None) -> None:
            found, name = pieces.setdefault((step, group, block), {}), (step, group, block)
            if payload is not None:
                found[offset] = bytes(payload)
                return
            whole.append(name)
            if b"".join(found[at] for at in sorted(found)) != cache.export(group, block):
                wrong.append(name)

        first.runner.watch(take)
        request = replace(mixed_requests(300, 400, longest=150, count=1)[0], prompt_ids=tuple(range(5, 205)))
        first.add(replace(request, sends=Transfer(request.id, address)))
        while first.has_work() and len(whole) != 12:
            first.step()
        until(lambda: len(whole) == 12)
        assert not wrong and all(len(found) == 4 for found in pieces.values()), "a piece for each layer"


@needs_native
def test_without_a_free_core_blocks_are_sent_after_the_step(address):
    with two("kvasir-mini", address, overlap=False) as (first, second):
        assert first.runner.capacity.grows == ()
        requests = mixed_requests(first.info.vocab_size, 400, longest=150, count=4)
        same(
            plain(core_of("kvasir-mini", block_size=16, threads=1), requests),
            handed_over(first, second, requests, address),
        )
        assert second.stats().tier_loaded_tokens > 0 and exchange_of(first).outbox.stats.grown == 0


@needs_native
def test_other_weights_are_refused_and_computed(tmp_path, address):
    pytest.importorskip("torch")
    folders = [tmp_path / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        random_model("llama", folder, seed)
    requests = [replace(r, params=replace(r.params, n=1)) for r in mixed_requests(300, 400, longest=150, count=3)]
    with two(str(folders[0]), address, str(folders[1])) as (first, second):
        for request in requests:
            first.add(replace(request, sends=Transfer(request.id, address)))
        while first.has_work():
            first.step()
        until(lambda: not any(exchange_of(first).outbox.is_open(r.id) for r in requests))
        answers = {(r.id, 0): Answer() for r in requests}
        for request in requests:
            second.add(replace(request, takes=Transfer(request.id, seconds=0.1)))
        while second.has_work():
            for delta in second.step():
                answers[delta.id, delta.index].take(delta)
        same(plain(core_of(str(folders[1]), block_size=16, threads=1), requests), answers)
        assert second.stats().tier_loads == {}


@needs_native
def test_the_same_weights_in_other_files_of_the_same_content_are_the_same(tmp_path, address):
    """Copies have other paths and times."""
    copies = []
    for name in ("one", "two"):
        shutil.copytree(ASSETS / "kvasir-mini", tmp_path / name)
        copies.append(str(tmp_path / name))
    requests = mixed_requests(2000, 400, longest=100, count=3)
    with two(copies[0], address, copies[1]) as (first, second):
        expected = plain(core_of("kvasir-mini", block_size=16, threads=1), requests)
        same(expected, handed_over(first, second, requests, address))
        assert second.stats().tier_loaded_tokens > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "prefill"}, "--transfer-listen"),
        ({"role": "other", "transfer_peer": ["10.0.0.1"]}, "expected one of both"),
        ({"transfer_key": "x"}, "--transfer-listen"),
        ({"transfer_listen": "x/y", "prefix_cache": False}, "--no-prefix-cache"),
        ({"transfer_listen": "nothing"}, "HOST:PORT"),
        ({"transfer_listen": "127.0.0.1:0"}, "--transfer-key"),
        ({"transfer_peer": ["10.0.0.1"]}, "--transfer-cert"),
        ({"transfer_listen": "/tmp/" + 100 * "x"}, "too long"),
        ({"transfer_peer": ["/tmp/x/y"], "transfer_memory": 1000}, "8 blocks"),
    ],
)
def test_contradictory_options_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        core_of("kvasir-mini", **options)
    assert message in f"{error.value} {error.value.hint}"
