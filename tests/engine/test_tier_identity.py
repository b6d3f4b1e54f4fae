"""A folder of prefixes knows weights by their content: not by where they lie, nor by their times."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvasir.engine.core import EngineCore
from tests.engine.cores import core_of, random_model
from tests.oracle import plain
from tests.runner.made import request

pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _computing_is_slow(monkeypatch):
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)


@pytest.fixture
def made(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return Path(random_model("llama", folder))


def loaded(folder: Path, disk: Path) -> int:
    """Tokens of a prompt that a new engine finds in the folder `disk`."""
    core: EngineCore = core_of(str(folder), threads=1, block_size=16, num_blocks=40, cache_dir=str(disk))
    plain(core, [request("a", range(100))])
    core.close(30.0)
    return core.stats().tier_loaded_tokens


def weights_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def test_a_copy_finds_the_prefixes_of_the_original(made, tmp_path):
    assert loaded(made, tmp_path / "kv") == 0
    copy = tmp_path / "copy"
    shutil.copytree(made, copy)
    os.utime(weights_of(copy), ns=(1, 1))
    assert loaded(copy, tmp_path / "kv") == 96


def test_other_weights_of_equal_size_and_time_find_nothing(made, tmp_path):
    file = weights_of(made)
    before = file.stat()
    assert loaded(made, tmp_path / "kv") == 0
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    with open(file, "r+b") as changed:
        changed.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size and file.stat().st_mtime_ns == before.st_mtime_ns
    assert loaded(made, tmp_path / "kv") == 0
