"""The disk tier under scheduler and pool, over the fake runner, whose answers are read from the cache: a block that
came back with another content is a wrong token or a loud error."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from kvasir.engine.core import EngineCore
from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import GroupFacts, StoredBlock, StoreFacts, chain
from kvasir.kv.tiers.disk import DiskTier
from kvasir.plan import pack_ids
from kvasir.runner.fake import FakeRunner
from kvasir.sched.admission import namespace
from kvasir.sched.budget import StepTime
from kvasir.sched.scheduler import Scheduler
from kvasir.sched.service import Service
from kvasir.types import FinishReason, Request, SamplingParams
from tests.kv._disk import path_of
from tests.kv._tiers import read_at, until
from tests.sched.drive import adapter, adapter_pool, by_hand, request

SIZE = 8
PROMPT = list(range(10, 90))  # ten blocks, of which one more request can take nine


@pytest.fixture(autouse=True)
def compute_seconds(monkeypatch):
    """How long computing is believed to take: the fake runner is faster than any disk. A test may change it."""
    seconds = [20.0]
    monkeypatch.setattr(Service, "prefill_seconds", lambda self, start, tokens: seconds[0])
    return seconds


def make(folder: Path, *, max_bytes: int = 1 << 20, tier_bytes: int = 1 << 20, fault=None, **options) -> EngineCore:
    runner = FakeRunner(**{"block_size": SIZE, "num_blocks": 40, "fault": fault, **options})
    tier = DiskTier(folder, StoreFacts("fake", "1", SIZE, (GroupFacts("ids", SIZE * 8),)), max_bytes)
    assert tier.wait_scanned(30.0)
    return EngineCore(runner, Scheduler(runner.capacity, tier=tier, tier_bytes=tier_bytes, adapters=adapter_pool()))


def run(core: EngineCore, *requests: Request, faulty: bool = False) -> None:
    """All of them at once, to their ends; the tokens are those one can compute by hand. faulty: who was alone in a step
    that failed may end with an error; what he had until then is right."""
    tokens: dict[str, list[int]] = {r.id: [] for r in requests}
    reasons = {}
    for r in requests:
        core.add(r)
    deadline = time.monotonic() + 60
    while core.has_work():
        for delta in core.step():
            tokens[delta.id] += delta.token_ids
            reasons[delta.id] = delta.finish_reason
        core.check()
        assert time.monotonic() < deadline, "no end"
    for r in requests:
        (expected,) = by_hand(r, 256, 512)
        failed = reasons[r.id] is FinishReason.ERROR
        assert faulty or not failed
        assert tokens[r.id] == expected[: len(tokens[r.id]) if failed else None], r.id


def tier_of(core: EngineCore) -> DiskTier:
    store = core.scheduler.store
    assert store and isinstance(store.tier, DiskTier)
    return store.tier


def written(core: EngineCore) -> None:
    until(lambda: tier_of(core).stats().queued_bytes == 0)


def restarted(folder: Path, **options) -> EngineCore:
    """An engine over the folder of one that has computed PROMPT and ended."""
    first = make(folder)
    run(first, request("a", PROMPT))
    first.close()
    assert first.stats().tier_saves["saved"] >= 10
    return make(folder, **options)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("window", [0, 20])
def test_a_hit_after_a_restart(tmp_path, window, overlaps):
    options = {"window": window, "overlaps": overlaps}
    first = make(tmp_path / "kv", **options)
    run(first, request("a", PROMPT))
    first.close()
    core = make(tmp_path / "kv", **options)
    run(core, request("b", PROMPT))
    stats = core.stats()
    assert stats.tier_loaded_tokens == 72 == stats.cached_tokens
    assert stats.tier_loads == {"loaded": 3 if window else 9}
    run(core, request("c", PROMPT))
    assert core.stats().tier_loaded_tokens == 72, "it is in the tree now"
    assert core.stats().cached_tokens == 72 + 79


def test_evicted_blocks_come_back(tmp_path):
    """Within one life: what others pushed out of a small pool is read again."""
    core = make(tmp_path / "kv", num_blocks=14)
    run(core, request("a", PROMPT))
    for i in range(3):
        run(core, request(f"o{i}", [100 + i] * 80))
    written(core)
    run(core, request("b", PROMPT))
    assert core.stats().tier_loaded_tokens >= 64
    assert core.stats().evicted_blocks > 20


def test_the_first_of_many_that_begin_alike_loads(tmp_path):
    core = restarted(tmp_path / "kv")
    run(core, *(request(f"b{i}", [*PROMPT, i, i, i]) for i in range(6)))
    assert core.stats().tier_loads == {"loaded": 10}
    assert core.stats().cached_tokens == 6 * 80


def test_a_part_of_the_prefix_is_in_the_tree(tmp_path):
    core = restarted(tmp_path / "kv")
    run(core, request("short", PROMPT[:30]))
    assert core.stats().tier_loads == {"loaded": 3}
    run(core, request("b", PROMPT))
    assert core.stats().tier_loads == {"loaded": 9}
    assert core.stats().tier_loaded_tokens == 72, "the block that the short one had begun is read whole"


@pytest.mark.parametrize("harm", ["flip", "cut", "empty", "gone"])
def test_a_damaged_file_is_recomputed(tmp_path, harm):
    """Blocks before it are used, and none after it."""
    core = restarted(tmp_path / "kv")
    path = path_of(tmp_path / "kv", stored_blocks(PROMPT)[4], model="fake")
    data = bytearray(path.read_bytes())
    if harm == "flip":
        data[-3] ^= 1
        path.write_bytes(data)
    elif harm == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) - 5] if harm == "cut" else b"")
    run(core, request("b", PROMPT))
    reason = {"flip": "corrupt", "gone": "missing"}.get(harm, "truncated")
    assert core.stats().tier_loads[reason] == 1
    assert core.stats().tier_loaded_tokens == 4 * SIZE
    run(core, request("c", PROMPT))


def stored_blocks(ids: list[int]) -> list[StoredBlock]:
    space = namespace(request("x", ids), False)
    return chain(space, pack_ids(ids), SIZE)


def test_blocks_of_other_model_facts_are_not_used(tmp_path):
    first = make(tmp_path / "kv")
    run(first, request("a", PROMPT))
    first.close()
    for change in ({"model": "other"}, {"numerics": "2"}):
        core = make(tmp_path / "kv")
        facts = StoreFacts(
            **{"model": "fake", "numerics": "1", **change}, block_size=SIZE, groups=(GroupFacts("ids", 64),)
        )
        tier_of(core).facts = facts
        run(core, request("b", PROMPT))
        assert core.stats().tier_loaded_tokens == 0
        assert set(core.stats().tier_loads) == ({"stale"} if "numerics" in change else set())


def test_private_requests_leave_nothing_and_take_nothing(tmp_path):
    core = make(tmp_path / "kv", num_blocks=14)
    secret = Request("a", tuple(PROMPT), SamplingParams(max_tokens=8, seed=0), no_cache=True)
    run(core, secret)
    core.close()
    assert core.stats().tier_saves == {}
    core = restarted(tmp_path / "kv")
    run(core, Request("b", tuple(PROMPT), SamplingParams(max_tokens=8, seed=0), no_cache=True))
    run(core, Request("c", tuple(PROMPT), SamplingParams(max_tokens=8, seed=0), cache_salt="s"))
    assert core.stats().tier_loads == {}


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (adapter("other name", content="content of x"), True),
        (adapter("x", content="other content"), False),
        (adapter("x", 0.5), False),
        (None, False),
    ],
)
def test_blocks_of_an_adapter_are_known_by_its_content_and_scale(tmp_path, second, found):
    params = SamplingParams(max_tokens=8, seed=0)
    core = make(tmp_path / "kv", num_blocks=14)
    run(core, Request("a", tuple(PROMPT), params, adapters=(adapter("x"),)))
    core.close()
    core = make(tmp_path / "kv")
    run(core, Request("b", tuple(PROMPT), params, adapters=(second,) if second else ()))
    assert bool(core.stats().tier_loaded_tokens) == found


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """While it is cleared, no read of a disk ends."""
    gate, unseal = threading.Event(), record.unseal
    gate.set()

    def late(*args):
        assert gate.wait(60.0)
        return unseal(*args)

    monkeypatch.setattr(record, "unseal", late)
    return gate


def test_an_abort_while_loading_leaves_no_ticket(tmp_path, gate):
    core = restarted(tmp_path / "kv")
    gate.clear()
    core.add(request("b", PROMPT))
    core.step()
    assert tier_of(core).stats().open_loads == 9
    core.check()
    core.add(request("c", [3] * 20))
    while core.scheduler.running or len(core.scheduler.waiting) > 1:
        core.step()  # others pass meanwhile
    assert [s.request.id for s in core.scheduler.waiting] == ["b"]
    core.abort("b")
    assert tier_of(core).stats().open_loads == 0 == core.stats().tier_bytes_loaded
    core.check()
    core.step()  # the row of "c" is freed
    assert not core.has_work()
    gate.set()
    run(core, request("b2", PROMPT))
    assert core.stats().tier_loaded_tokens == 72


def test_a_load_that_takes_too_long_is_computed_instead(tmp_path, compute_seconds, gate):
    core = restarted(tmp_path / "kv")
    gate.clear()
    compute_seconds[0] = 0.03
    run(core, request("b", PROMPT))
    assert core.stats().tier_loads == {"late": 9}
    assert core.stats().tier_loaded_tokens == 0
    gate.set()


def test_a_disk_that_is_slower_than_computing_is_not_read(tmp_path, monkeypatch):
    core = restarted(tmp_path / "kv")
    read_at(monkeypatch, 2.0)
    run(core, request("b", PROMPT))
    assert core.stats().tier_loads == {"slow": 9}
    assert core.stats().tier_loaded_tokens == 0


@pytest.mark.parametrize("prompt_seconds", [1e-6, 20.0])
def test_blocks_that_are_computed_faster_than_read_are_not_written(
    tmp_path, monkeypatch, compute_seconds, prompt_seconds
):
    """Neither when it is evicted nor at the end."""
    compute_seconds[0] = prompt_seconds
    core = make(tmp_path / "kv", num_blocks=14)
    read_at(monkeypatch, 1e6)
    for i in range(4):
        run(core, request(f"o{i}", [100 + i] * 80))
    written(core)
    evicted = sum(core.stats().tier_saves.values())
    core.close()
    saves = core.stats().tier_saves
    assert set(saves) == ({"slow"} if prompt_seconds < 1 else {"saved"})
    assert evicted > 20 and sum(saves.values()) > evicted + 9


@pytest.mark.parametrize(
    ("token_seconds", "bytes_a_second", "read"),
    [(1.0, 1e5, True), (1e-6, 1e5, False), (1.0, 5.0, False), (0.0, 5.0, True)],
)
def test_the_measured_rates_of_both_decide(tmp_path, monkeypatch, token_seconds, bytes_a_second, read):
    """A block is 8 tokens, of 8 bytes each. A rate that is not known yet refuses nothing."""
    core = restarted(tmp_path / "kv")
    monkeypatch.undo()  # as in life
    core.scheduler.service.step_time = StepTime(costs=(token_seconds, 0.0, 0.0, 0.0))
    read_at(monkeypatch, bytes_a_second)
    core.add(request("b", PROMPT))
    core.scheduler.plan()
    (seq,) = core.scheduler.waiting + core.scheduler.running
    assert (seq.fetch is not None and seq.fetch.open) == read
    core.abort("b")


def test_bytes_in_flight_are_bounded(tmp_path):
    core = restarted(tmp_path / "kv", tier_bytes=4 * SIZE * 8)
    run(core, request("b", PROMPT))
    assert core.stats().tier_loaded_tokens == 4 * SIZE
    assert core.stats().tier_loads == {"loaded": 4}


def test_a_step_that_fails_after_loading_costs_nothing_but_time(tmp_path):
    failed = []

    def fault(plan):
        if plan.loads and not failed:
            failed.append(plan)
            raise RuntimeError("the step fails")

    core = restarted(tmp_path / "kv", fault=fault)
    run(core, request("b", PROMPT), request("o", [7] * 30, max_tokens=150, ignore_eos=True), faulty=True)
    assert failed
    run(core, request("c", PROMPT))


@pytest.mark.few(2)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_many_evictions_change_no_answer(tmp_path, seed, window, overlaps):
    """Many prompts that begin alike in a pool for two of them, with failing steps; then the same in another engine."""
    rng = random.Random(seed)
    failing = random.Random(seed + 100)

    def fault(plan):
        if plan.work and failing.random() < 0.03:
            raise RuntimeError("the step fails")

    heads = [[rng.randrange(256) for _ in range(48)] for _ in range(5)]
    options = {"num_blocks": 22, "max_rows": 6, "window": window, "overlaps": overlaps, "max_tokens_per_step": 40}
    core = make(tmp_path / "kv", fault=fault, **options)
    for life in range(2):
        for turn in range(12):
            made = []
            for i in range(rng.randint(1, 6)):
                prompt = rng.choice(heads)[: rng.choice([20, 40, 48])]
                prompt = prompt + [rng.randrange(256) for _ in range(rng.randrange(30))]
                made.append(request(f"{life}.{turn}.{i}", prompt, max_tokens=rng.randint(1, 12)))
            run(core, *made, faulty=True)
            written(core)
        assert core.stats().tier_loaded_tokens > 0
        core.close()
        core = make(tmp_path / "kv", fault=fault, **options)


def test_a_full_folder_keeps_within_its_bound(tmp_path):
    core = make(tmp_path / "kv", num_blocks=14, max_bytes=35_000)
    for i in range(20):
        run(core, request(f"o{i}", [100 + i] * 80))
    core.close()
    assert 0 < sum(f.stat().st_size for f in (tmp_path / "kv").rglob("*.0")) <= 35_000
    assert core.stats().tier_evicted > 0
