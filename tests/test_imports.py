"""torch is an extra: which files may import it, and that the program path runs without it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import httpx
import pytest

from kvasir import device
from kvasir.errors import ConfigError
from kvasir.ops import native
from tests.cli.running import PATHS, run
from tests.e2e.server import serving
from tests.test_arrows import ROOT, checker

# The eager and the graph executor and what only they import, the reference bodies of ops, and the reference sampler.
EAGER = (
    "parallel/group.py",  # of the eager bodies of collectives
    "device/copies.py",
    "device/replays.py",
    "graph/*.py",
    "device/libraries.py",
    "layers/batch.py",
    "layers/kv_cache.py",
    "layers/rope_tensors.py",
    "layers/tensors.py",
    "ops/*/body.py",
    "ops/*/plan.py",
    "ops/attention/weights.py",
    "ops/norm/native.py",
    "ops/products.py",
    "runner/eager_adapters.py",
    "runner/eager_draft.py",
    "runner/eager_executor.py",
    "runner/device_packing.py",
    "runner/device_rows.py",
    "runner/eager_selftest.py",
    "runner/graph_*.py",
    "runner/host_sampling.py",
    "runner/make_eager.py",
    "runner/make_graph.py",
    "runner/probe.py",
    "sampling/device_state.py",
    *(
        f"sampling/{name}.py"
        for name in ("chain", "filters", "gumbel", "logprobs", "numerics", "philox", "processors", "sampler")
    ),
)
# Hides torch from every process that finds it on PYTHONPATH.
HIDE = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"torch is hidden ({name})", name=name)

sys.meta_path.insert(0, NoTorch())
"""
needs_kernels = pytest.mark.skipif(not native.available(), reason=native.reason())


def modules() -> dict[str, Any]:
    """The modules of the package by dotted name, as the checker of import arrows reads them."""
    package = ROOT / "src" / "kvasir"
    found = (checker.read(path, package) for path in sorted(package.rglob("*.py")))
    return {module.dotted: module for module in found}


def listed(file: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(file, pattern) for pattern in patterns)


@pytest.fixture(scope="module")
def importers() -> list[str]:
    """The files that import torch, or a module of the eager executor, when they are imported."""
    every = modules()
    eager = {name for name, module in every.items() if listed(module.rel, EAGER)}

    def loads_torch(target: str) -> bool:
        return any(name.partition(".")[0] == "torch" or name in eager for name in checker._loads(target, every))

    return [m.rel for m in every.values() if any(loads_torch(target) for target, _ in m.at_load)]


def test_only_the_eager_executor_imports_torch(importers):
    assert [file for file in importers if not listed(file, EAGER)] == []


def test_every_file_allowed_to_import_torch_imports_it(importers):
    assert [pattern for pattern in EAGER if not any(fnmatch(file, pattern) for file in importers)] == []


@pytest.fixture(scope="module")
def hidden(tmp_path_factory) -> str:
    """A folder for the start of PYTHONPATH, which hides torch."""
    folder = tmp_path_factory.mktemp("no-torch")
    (folder / "sitecustomize.py").write_text(HIDE)
    return str(folder)


def without(hidden: str, *command: str, **env: str):
    return run(*command, PYTHONPATH=os.pathsep.join([hidden, PATHS]), **env)


def answer(*command: str) -> tuple[str, ...]:
    return ("kvasir.cli", "run", "kvasir-mini", "hi", "--temperature", "0", "--max-tokens", "4", *command)


@pytest.mark.slow  # test_the_library_gives_the_same_answers is its twin
@needs_kernels
def test_run_gives_the_same_answer(hidden):
    done = without(hidden, *answer())
    assert done.returncode == 0, done.stderr
    assert done.stdout == run(*answer()).stdout


@pytest.mark.slow  # tests/e2e/test_serve.py finds no torch in the processes of a server
@needs_kernels
def test_a_server_answers(hidden):
    with serving("kvasir-mini", path=hidden) as (base, _):
        body = {"model": "kvasir-mini", "prompt": "hi", "max_tokens": 4, "temperature": 0, "logprobs": 1}
        reply = httpx.post(f"{base}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == 4


CALLS = """
from kvasir import LLM, SamplingParams

with LLM("kvasir-mini") as llm:
    params = SamplingParams(temperature=0.8, seed=1, top_p=0.9, max_tokens=6, logprobs=2)
    print([output.outputs[0].text for output in llm.generate(["There once was", "Hello"], params)])
import sys
assert "torch" not in sys.modules
"""


@needs_kernels
def test_the_library_gives_the_same_answers(hidden, tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    path = os.pathsep.join([str(tmp_path), PATHS])
    usual = run("calls", PYTHONPATH=path)
    assert usual.returncode == 0, usual.stderr
    assert run("calls", PYTHONPATH=os.pathsep.join([hidden, path])).stdout == usual.stdout


@pytest.mark.slow
@needs_kernels
def test_a_benchmark_runs(hidden):
    options = ("--input-len", "8", "--output-len", "4", "--repeats", "1")
    done = without(hidden, "kvasir.cli", "bench", "kvasir-mini", *options)
    assert done.returncode == 0, done.stderr


def test_files_are_inspected(hidden):
    done = without(hidden, "kvasir.cli", "inspect", "kvasir-mini", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["memory"]["executor"] == ("program" if native.available() else "eager")


@needs_kernels
def test_the_doctor_finds_nothing_fatal(hidden):
    done = without(hidden, "kvasir.cli", "doctor", "--json")
    facts = json.loads(done.stdout)
    assert done.returncode == 0, facts["problems"]
    assert {start["executor"] for start in facts["starts"]} == {"program"}


def test_the_store_is_managed(hidden, tmp_path):
    (tmp_path / "Modelfile").write_text("FROM kvasir-mini\nSYSTEM Be brief.\n")
    home = {"KVASIR_MODELS": str(tmp_path / "models")}
    for command in (("create", "brief", "-f", str(tmp_path / "Modelfile")), ("list",), ("show", "brief")):
        done = without(hidden, "kvasir.cli", *command, **home)
        assert done.returncode == 0, done.stderr
    assert "Be brief." in done.stdout


def test_a_model_that_needs_the_extra_names_it(hidden):
    done = without(hidden, *answer("--executor", "eager"))
    assert done.returncode == 2 and "pip install 'kvasir-llm[torch]'" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_start_with_neither_kernels_nor_torch_names_both_remedies(hidden, tmp_path):
    done = without(hidden, *answer(), KVASIR_LIBRARY=str(tmp_path / "absent.so"))
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "KVASIR_LIBRARY" in done.stderr and "pip install 'kvasir-llm[torch]'" in done.stderr


def test_the_doctor_with_neither_names_both_remedies(hidden, tmp_path):
    done = without(hidden, "kvasir.cli", "doctor", "--json", KVASIR_LIBRARY=str(tmp_path / "absent.so"))
    [fatal] = [problem for problem in json.loads(done.stdout)["problems"] if problem["fatal"]]
    assert done.returncode == 1 and "KVASIR_LIBRARY" in fatal["message"] and "kvasir-llm[torch]" in fatal["next"]


def test_a_gpu_needs_torch(monkeypatch):
    for module in ("torch_extra", "capability"):
        monkeypatch.setattr(f"kvasir.device.{module}.has_torch", lambda: False)
    with pytest.raises(ConfigError, match=r"kvasir-llm\[torch\]"):
        device.detect("cuda")
    assert device.detect("auto").kind == "cpu"


def test_torch_is_not_imported_where_no_driver_is(tmp_path):
    file = tmp_path / "driver"
    assert not device.capability.has_driver([str(file)])
    file.touch()
    assert device.capability.has_driver([str(file)])
