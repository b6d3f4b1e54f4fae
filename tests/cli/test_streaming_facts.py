"""What `kvasir inspect` says about memory: whether a model fits, and what to expect if it is streamed."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.streaming_facts import StreamingFacts, streaming_dict, streaming_lines
from kvasir.errors import ConfigError
from kvasir.ops import native
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model
from kvasir.weights.read_rate import read_rate
from tests.engine.cores import core_of

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


def inspect(*arguments: object) -> dict:
    result = CliRunner().invoke(app, ["inspect", "kvasir-mini", "--json", *map(str, arguments)])
    if result.exception:
        raise result.exception
    return json.loads(result.output)["streaming"]


def test_a_model_that_fits():
    found = inspect()
    assert found["fits"] and found["free_memory"] > found["weights"] > 0


def test_what_is_foreseen_is_what_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("KVASIR_PACKED", str(tmp_path / "packed"))
    budget = inspect()["weights"] * 9 // 10
    found = inspect("--weights-memory", budget)
    loaded = load_model(find_model("kvasir-mini"), options=LoadOptions("program", weights_memory=budget))
    assert loaded.stream
    kept = loaded.stream.layers - len(loaded.stream.streamed)
    assert (found["layers"], found["layers_in_memory"]) == (loaded.stream.layers, kept)
    assert found["bytes_per_step"] == pytest.approx(loaded.stream.per_step, rel=0.02)  # whole pages
    assert 0 < kept < loaded.stream.layers
    loaded.stream.close()


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_what_is_foreseen_of_ranks_and_stages_is_what_they_load(tmp_path, monkeypatch, ranks, stages):
    monkeypatch.setenv("KVASIR_PACKED", str(tmp_path / "packed"))
    mesh = "-tp", ranks, "-pp", stages
    budget = inspect(*mesh)["weights"] * 9 // 10
    found = inspect("--weights-memory", budget, *mesh)
    core = core_of(
        "kvasir-mini", executor="program", threads=ranks * stages, tensor_parallel=ranks, pipeline_parallel=stages,
        weights_memory=budget,
    )  # fmt: skip
    [note] = (line for line in core.summary if "are streamed" in line)
    core.close()
    read = note.split("read ")[1].split(" MiB")[0].split(", ")
    assert len(read) == found["processes"] == ranks * stages
    assert found["bytes_per_step"] / 2**20 == pytest.approx(sum(map(float, read)), abs=len(read))  # whole MiB
    assert 0 <= found["layers_in_memory"] < found["layers"] == 4


def test_ranks_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="tensor_parallel is 3"):
        inspect("-tp", 3)
    with pytest.raises(ConfigError, match="cannot be divided into 5 stages"):
        inspect("-pp", 5)


def test_a_budget_that_is_too_small_is_refused_and_too_little_memory_is_reported(monkeypatch):
    with pytest.raises(ConfigError, match="too few"):
        inspect("--weights-memory", 1)
    monkeypatch.setattr("kvasir.memory.host_memory", lambda: (2 << 20, 1 << 20))
    found = inspect()
    assert not found["fits"] and "too few" in found["problem"]


def test_a_step_takes_as_long_as_its_bytes():
    facts = StreamingFacts(20 << 30, 40 << 30, False, 10 << 30, 40, 8, 32 << 30, rate=2 << 30, users=64)
    assert facts.seconds == 16 and facts.tokens_per_second(64) == 4
    assert streaming_dict(facts)["tokens_per_second"] == {"1": 1 / 16, "64": 4.0}
    text = "\n".join(streaming_lines(facts))
    assert "8 of 40 layers stay, and a step reads 32.0 GiB" in text
    assert "at least 16.00 s" in text and "4.00 tokens per second for 64 users" in text


def test_the_rate_of_a_disk(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20) * 16)
    try:
        assert read_rate(path) > 0
    except OSError:
        pytest.skip("this file system has no direct reads")
    os.truncate(path, 100)
    assert read_rate(path) == 0
