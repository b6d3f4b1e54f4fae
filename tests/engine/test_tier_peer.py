"""Two engines: what the first has computed and let go of, the second takes over a link, bit for bit."""

from __future__ import annotations

import os
import socket as socketlib
from pathlib import Path

import pytest

from kvasir.engine.core import EngineCore
from kvasir.errors import ConfigError
from tests.engine.cores import core_of, random_model
from tests.engine.test_tier_models import needs_native
from tests.kv._tiers import until
from tests.kv._transfer import KEY, certificate
from tests.oracle import mixed_requests, plain, poison, same, together

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _computing_is_slow(monkeypatch):
    """These models are computed faster than any tier is read: for the tier they take long."""
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)


@pytest.fixture
def socket(tmp_path) -> str:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return str(folder / "kv")


def free_port() -> int:
    with socketlib.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def make(folder: str, executor: str, **options) -> EngineCore:
    return core_of(folder, executor=executor, threads=1, block_size=16, **{"num_blocks": 60, **options})


def storm(core: EngineCore, expected, requests) -> None:
    """Requests through a pool too small for them, until all they left is written."""
    same(expected, together(core, requests))
    store = core.scheduler.store
    assert store
    until(lambda: store.tier.stats().queued_bytes == 0)
    assert core.stats().tier_saves["saved"] > 10


@pytest.mark.parametrize(
    ("model", "executor", "own"),
    [
        *(pytest.param("llama", "program", own, marks=needs_native) for own in (False, True)),
        pytest.param("llama", "eager", True, marks=pytest.mark.slow),
        pytest.param("mistral", "eager", False, marks=pytest.mark.slow),
    ],
    ids=lambda value: {True: "a folder of its own", False: "nothing of its own"}.get(value, value),
)
def test_the_second_takes_what_the_first_computed(tmp_path, socket, model, executor, own):
    made = tmp_path / "model"
    made.mkdir()
    folder, requests = random_model(model, made), mixed_requests(300, 200, longest=150)
    expected = plain(make(folder, executor), requests)
    first = make(folder, executor, num_blocks=13, cache_dir=str(tmp_path / "kv"), cache_offer=socket)
    more = {"cache_dir": str(tmp_path / "other")} if own else {}
    second = make(folder, executor, cache_peer=socket, **more)
    storm(first, expected, requests)
    poison(second, [set(range(pool.num_blocks)) for pool in second.scheduler.kv.pools])
    same(expected, together(second, requests, seed=2))
    stats = second.stats()
    assert stats.tier_loaded_tokens > 50 and set(stats.tier_loads) <= {"loaded", "missing"}

    first.close(30.0)
    assert not Path(socket).exists()
    same(expected, together(second, requests, seed=3))  # the peer has gone
    second.close(30.0)
    if own:
        assert second.stats().tier_saves["saved"] > 10, "what came from the peer is kept"


@needs_native
def test_engines_read_each_others_blocks_over_tcp(tmp_path):
    made, key = tmp_path / "model", tmp_path / "key"
    made.mkdir()
    key.write_bytes(KEY)
    key.chmod(0o600)
    known = {"transfer_key": str(key), "transfer_cert": str(certificate(tmp_path))}
    folder, requests = random_model("llama", made), mixed_requests(300, 200, longest=150)
    expected = plain(make(folder, "program"), requests)
    address = f"127.0.0.1:{free_port()}"
    first = make(folder, "program", num_blocks=13, cache_dir=str(tmp_path / "kv"), cache_offer=address, **known)
    second = make(folder, "program", cache_peer=address, **known)
    storm(first, expected, requests)
    same(expected, together(second, requests, seed=2))
    stats = second.stats()
    assert stats.tier_loaded_tokens > 50 and set(stats.tier_loads) <= {"loaded", "missing"}
    for core in (first, second):
        core.close(30.0)


def test_a_peer_of_other_weights_gives_nothing(tmp_path, socket):
    cores = []
    requests = mixed_requests(300, 200, longest=150)
    for seed, options in enumerate(
        ({"cache_dir": str(tmp_path / "kv"), "cache_offer": socket}, {"cache_peer": socket})
    ):
        made = tmp_path / str(seed)
        made.mkdir()
        folder = random_model("llama", made, seed)
        cores.append(make(folder, "auto", num_blocks=13, **options))
        expected = plain(make(folder, "auto"), requests)
        same(expected, together(cores[-1], requests))
    assert cores[1].stats().tier_loads == {}
    for core in cores:
        core.close()


def test_a_peer_that_is_not_there_costs_nothing(socket):
    core = core_of("kvasir-mini", cache_peer=socket)
    requests = mixed_requests(200, 200, longest=150)
    same(plain(core_of("kvasir-mini"), requests), together(core, requests))
    assert core.stats().tier_loads == {} and core.stats().tier_saves == {}
    core.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_offer": "x/kv"}, "cache_dir"),
        ({"cache_peer": "x/kv", "prefix_cache": False}, "--no-prefix-cache"),
        ({"cache_dir": "x", "cache_peer": "x/kv", "cache_offer": "x/kv"}, "cache_offer and cache_peer"),
        ({"cache_peer": "/tmp/" + 100 * "x"}, "too long"),
        ({"cache_peer": "kv"}, "HOST:PORT"),
        ({"cache_peer": "10.0.0.1:7200"}, "--transfer-key"),
        ({"cache_dir": "/tmp/x", "cache_offer": "10.0.0.1:7200"}, "--transfer-key"),
    ],
)
def test_contradictory_peer_options_are_refused(options, message):
    with pytest.raises(ConfigError) as error:
        core_of("kvasir-mini", **options)
    assert message in f"{error.value} {error.value.hint}"


def test_a_socket_in_a_folder_open_to_others_is_refused(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    os.chmod(folder, 0o755)
    for options in (
        {"cache_peer": str(folder / "kv")},
        {"cache_dir": str(tmp_path / "kv"), "cache_offer": str(folder / "kv")},
    ):
        with pytest.raises(ConfigError, match=str(folder)):
            core_of("kvasir-mini", **options)
