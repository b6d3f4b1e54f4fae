"""Keys and values are sized by what the weights leave, and all else that an engine takes is counted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.caches import attention
from kvasir.config import DeviceFacts, EngineOptions, ModelFacts
from kvasir.errors import ConfigError
from kvasir.memory import HEADROOM, Footprint
from kvasir.plan import CacheGroup
from kvasir.resolve import resolve

MIB = 1 << 20
LIMIT = 1550 * MIB  # torch built for CUDA takes 135 MiB more than torch for processors
GROUP = Path("/sys/fs/cgroup/memory")

sizes = st.integers(0, 2 << 30)


def groups(per_block: int, *windows: int) -> tuple[CacheGroup, ...]:
    return tuple(CacheGroup(attention(1, 1, window), (i,), per_block) for i, window in enumerate(windows))


footprints = st.builds(
    Footprint,
    mapped=sizes, buffers=sizes, samplers=sizes, angles=st.integers(0, 1 << 14), rows=st.integers(0, 1 << 12),
)  # fmt: skip


@given(
    footprints,
    st.integers(1 << 20, 64 << 30),
    st.integers(64, 1 << 21),
    st.lists(st.sampled_from((0, 4096)), min_size=1, max_size=2),
    st.integers(1, 1 << 24),
    st.sampled_from(("cpu", "cuda")),
    st.fixed_dictionaries(
        {},
        optional={
            "memory_fraction": st.floats(0.01, 1.0), "kv_memory": st.integers(1, 64 << 30), "cache_dir": st.just("x"),
            "num_blocks": st.integers(2, 5000), "max_num_seqs": st.integers(1, 256),
        },
    ),
)  # fmt: skip
def test_everything_together_fits_or_is_refused(footprint, free, positions, windows, per_block, kind, options):
    model = ModelFacts(positions, "float32", False, groups(per_block, *windows))
    model = replace(model, footprint=lambda tokens: footprint)
    try:
        config = resolve(EngineOptions("m", **options), model, DeviceFacts(kind, free, 4, 4, free))
    except ConfigError as error:
        assert error.hint
        return
    asked = "kv_memory" in options or "num_blocks" in options
    tiers = (config.load_bytes + config.save_bytes) * (kind == "cpu" and bool(config.cache_dir))
    taken = footprint.to_come(config.max_model_len) + config.kv_bytes
    assert taken <= free
    assert config.memory_left == free - taken - tiers
    if not asked:
        assert config.memory_left >= HEADROOM - 3 * per_block, "whole blocks, and a queue of one at least"


def test_the_cache_shares_the_memory_that_is_free_after_loading():
    """8 GiB free before a model of 5.6: half of all would be 4, of the rest 1.2."""
    model = ModelFacts(1 << 20, "float32", False, groups(MIB, 0))
    config = resolve(EngineOptions("m"), model, DeviceFacts("cpu", int(2.4 * 1024) * MIB, 4))
    assert 1100 * MIB < config.kv_bytes <= 1.2 * 1024 * MIB


def test_memory_for_rotary_angles_yields_to_the_kv_cache():
    model = ModelFacts(1 << 20, "float32", False, groups(MIB, 0), footprint=lambda tokens: Footprint(angles=512))
    config = resolve(EngineOptions("m"), model, DeviceFacts("cpu", 512 * MIB, 4))
    assert config.max_model_len < 1 << 20 and config.kv_bytes > 200 * MIB


@pytest.mark.parametrize(
    ("options", "expects"), [({}, False), ({"lora": ["x=x"]}, True), ({"loads_adapters": True}, True)]
)
def test_an_engine_that_will_have_adapters_makes_room_for_them_at_the_start(options, expects):
    model = ModelFacts(1 << 20, "float32", False, groups(MIB, 0))
    config = resolve(EngineOptions("m", **options), model, DeviceFacts("cpu", 2048 * MIB, 4))
    assert config.expects_adapters == expects


@pytest.fixture
def limited():
    """A control group of this machine: a function that sets its limit, and the folder."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), "")
    folder = GROUP / own.rpartition(":")[2].lstrip("/") / f"kvasir-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield folder
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError:  # the last process is still going
            time.sleep(0.1)


@contextlib.contextmanager
def serving(folder: Path, limit: int, model: str, *flags: str):
    """A server whose processes all live in the group; yields its port and what it has printed."""
    (folder / "memory.limit_in_bytes").write_text(str(limit))
    join = (
        f"echo $$ > {folder}/cgroup.procs && exec {sys.executable} -m kvasir.cli serve {model} --port 0 --verbose "
        + " ".join(flags)
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(["sh", "-c", join], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout
    reply = []
    try:
        for line in process.stdout:
            reply.append(line.rstrip())
            if line.strip().startswith("ready"):  # the last line of --verbose
                break
        else:
            raise AssertionError("\n".join(reply))
        address = next(line for line in reply if "http://" in line)
        yield process, address.split("http://")[1].split()[0].split("/")[0], reply
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def events(folder: Path) -> int:
    """How often the group had to kill."""
    lines = (folder / "memory.oom_control").read_text().split()
    return int(lines[lines.index("oom_kill") + 1])


def large_model(folder: Path) -> str:
    """About 600 MiB of weights, and 32 KiB of keys and values per token."""
    from tests.engine.cores import CONFIGS, random_model

    name = "large-for-memory"
    CONFIGS[name] = {
        **CONFIGS["llama"], "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 300000, "max_position_embeddings": 8192,
    }  # fmt: skip
    return random_model(name, folder)


async def full_load(address: str, length: int) -> list[int]:
    """Different texts as long as the context, one a row, and their status codes."""
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=240) as client:
        bodies = [
            {"model": "m", "prompt": [(7 * i + j * j) % 90000 for j in range(length - 16)], "max_tokens": 16,
             "temperature": 1.0, "seed": i, "logprobs": 3, "ignore_eos": True}
            for i in range(24)
        ]  # fmt: skip
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    assert all(a.json()["usage"]["completion_tokens"] == 16 for a in answers if a.status_code == 200)
    return [a.status_code for a in answers]


@pytest.mark.slow
@pytest.mark.parametrize("tier", [False, True], ids=["alone", "with a tier"])
def test_a_server_under_a_limit_starts_and_survives_full_load(tmp_path, limited, tier):
    """With a share of all that was free before the weights, these would not fit together."""
    (tmp_path / "model").mkdir()
    model = large_model(tmp_path / "model")
    flags = [
        "--served-model-name m",
        "--max-model-len 1024",
        "--max-num-seqs 24",
        "--kv-dtype float32",
    ]
    flags += [f"--cache-dir {tmp_path / 'kv'}"] if tier else []
    with serving(limited, LIMIT, model, *flags) as (process, address, reply):
        memory = next(line for line in reply if "stay free" in line)
        assert "weights 614" in memory and "rotary angles" in memory and "samplers" in memory
        assert ("tiers" in memory) is tier
        assert asyncio.run(full_load(address, 1024)) == [200] * 24
        assert events(limited) == 0 and process.poll() is None
        assert httpx.get(f"http://{address}/health").status_code == 200
    peak = int((limited / "memory.max_usage_in_bytes").read_text())
    assert peak <= LIMIT
    print(memory, f"peak {peak / MIB:.0f} MiB", json.dumps(reply[-3:]))


@pytest.mark.slow
def test_a_server_that_cannot_fit_is_refused_with_a_reason(tmp_path, limited):
    (tmp_path / "model").mkdir()
    model, flags = large_model(tmp_path / "model"), ("--executor program",)
    refused = r"(weights|KV cache).*MiB"
    with pytest.raises(AssertionError, match=refused), serving(limited, 1000 * MIB, model, *flags):
        pass
    assert events(limited) == 0
