"""The map of rooms holds in the source, and the checker sees each kind of violation when one is planted."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _load_checker():
    spec = importlib.util.spec_from_file_location("check_arrows", ROOT / "scripts" / "check_arrows.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


checker = _load_checker()


def plant(folder: Path, files: dict[str, str]) -> list[str]:
    """Write a small package and return what the checker says of it, one `file:line: text` each."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [str(found).replace(f"{folder}/", "") for found in checker.check(folder)]


def test_the_package_has_no_violations():
    assert [str(violation) for violation in checker.check(ROOT / "src" / "kvasir")] == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("sched/loop.py", "import kvasir.runner", "sched -> runner: no such arrow"),
        ("sched/loop.py", "from kvasir import runner", "sched -> runner: no such arrow"),
        ("sched/loop.py", "from ..runner import rows", "sched -> runner.rows: no such arrow"),
        ("sched/loop.py", "def f():\n    import kvasir.ops", "sched -> ops: no such arrow"),
        ("sched/loop.py", "from torch import nn", "sched -> torch: "),
        ("sched/loop.py", "def f():\n    import torch", "sched -> torch: "),
        ("serve/dialects/openai.py", "from kvasir.engine import core", "serve -> engine.core: no such arrow"),
        ("kv/tiers/disk.py", "from kvasir.kv.transfer import link", "kv.tiers -> kv.transfer.link: no such arrow"),
        ("kv/transfer/link.py", "from kvasir.kv import peers", "kv.transfer -> kv.peers: no such arrow"),
        ("serve/http/a.py", "from kvasir.serve import auth", "serve.http -> serve.auth: no such arrow"),
        ("engine/client.py", "def f():\n    import torch", "engine -> torch: "),
        ("plan.py", "import msgspec", "plan -> msgspec: the ground imports the standard library only"),
        ("kv/pool.py", "def f(:", "not Python: "),
        ("somewhere/new.py", "", "room `somewhere` is not in the table"),
        ("ops/norm/__init__.py", "import ctypes", "ops -> ctypes: allowed only in ops/native.py"),
        (
            "ops/norm/fast.py",
            "import triton.language as tl",
            "ops -> triton: allowed only in ops/launch.py",
        ),
        (
            "runner/graph.py",
            "import torch\ntorch.cuda.synchronize()",
            "runner -> torch.cuda: allowed only in",
        ),
        ("runner/graph.py", "from torch import cuda", "runner -> torch.cuda: allowed only in device/*"),
        ("runner/graph.py", "import torch.nn\nx = torch.cuda.Stream()", "runner -> torch.cuda: allowed only"),
        ("runner/a.py", "import torch.distributed as dist", "runner -> torch.distributed: allowed only in"),
        ("cli/web.py", "from fastapi import FastAPI", "cli -> fastapi: allowed only in serve/*"),
        ("serve/bus.py", "import zmq.asyncio", "serve -> zmq: allowed only in engine/*"),
        ("serve/app.py", "import ray", "serve -> ray: allowed only in data/dataset.py"),
        ("text/a.py", "import os\nx = os.environ['A']", "text -> os.environ: allowed only in environment.py"),
        ("text/a.py", "import os as o\nx = o.getenv('A')", "text -> os.getenv: allowed only in environment.py"),
        ("text/a.py", "from os import environ as e", "text -> os.environ: allowed only in environment.py"),
        ("text/a.py", "import transformers", "text -> transformers: allowed nowhere"),
        ("weights/a.py", "from gguf import GGUFReader", "weights -> gguf: allowed nowhere"),
        ("weights/a.py", "import pickle", "weights -> pickle: allowed nowhere"),
        ("weights/a.py", "import torch\nx = torch.load('f')", "weights -> torch.load: allowed nowhere"),
        ("weights/a.py", "from torch import load", "weights -> torch.load: allowed nowhere"),
        (
            "weights/a.py",
            "import numpy\nnumpy.load('f', allow_pickle=True)",
            "-> allow_pickle=: allowed nowhere",
        ),
        ("cli/a.py", "import subprocess\nsubprocess.run('x', shell=True)", "cli -> shell=: allowed nowhere"),
        ("models/a.py", "x = eval('1')", "models -> eval: allowed nowhere"),
        ("models/a.py", "exec('1')", "models -> exec: allowed nowhere"),
        ("runner/a.py", "from importlib import import_module", "runner -> importlib.import_module: allowed"),
    ],
)
def test_a_planted_violation_is_named_with_its_place(tmp_path, name, text, message):
    found = plant(tmp_path, {name: text})
    assert any(line.startswith(f"{name}:") and message in line for line in found), found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sched/loop.py", "from kvasir.kv import BlockPool\nfrom kvasir.plan import StepPlan\nimport numpy"),
        ("ops/norm/native.py", "import ctypes\nfrom kvasir.device import capability\nimport torch"),
        ("ops/native.py", "import ctypes\nfrom importlib import import_module"),
        ("device/gpu.py", "import torch\ntorch.cuda.synchronize()"),
        ("environment.py", "import os\nx = os.environ.get('KVASIR_ISA')"),
        ("models/a.py", "import torch\nimport re\nmodule.eval()\nre.compile('x')"),
        ("guided/a.py", "def compile(x): return x\ncompile('x')"),
        ("engine/client.py", "def start():\n    from kvasir.engine import core"),
        ("engine/core.py", "import torch\nfrom kvasir.runner import rows"),
        ("serve/app.py", "from kvasir.engine.client import Engine\nfrom kvasir import __version__"),
        ("kv/peers/tier.py", "from kvasir.kv.tiers import record\nfrom kvasir.kv.transfer import link"),
        ("text/a.py", "import numpy\nnumpy.load('f', allow_pickle=False)"),
        ("text/a.py", "import os.path\nos.path.join('a', 'b')"),
    ],
)
def test_arrows_of_the_tables_are_allowed(tmp_path, name, text):
    assert plant(tmp_path, {name: text}) == []


def test_torch_after_a_chain_of_imports_is_found(tmp_path):
    found = plant(
        tmp_path,
        {
            "engine/client.py": "from typing import Any\nfrom kvasir.engine.process import start",
            "engine/process.py": "from kvasir.engine import core",
            "engine/core.py": "import torch",
        },
    )
    chain = "kvasir.engine.client -> kvasir.engine.process -> kvasir.engine.core -> torch"
    assert found == [f"engine/client.py:2: importing it loads torch: {chain}"]


def test_torch_in_a_parent_package_is_found(tmp_path):
    found = plant(
        tmp_path,
        {
            "kv/pool.py": "",
            "engine/__init__.py": "from kvasir.engine import core",
            "engine/core.py": "import torch",
        },
    )
    assert len(found) == 1 and found[0].startswith("engine/__init__.py:1: importing it loads torch")


def test_imports_that_do_not_run_at_load_do_not_count_for_the_chain(tmp_path):
    lazy = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvasir.engine.core import Core\n"
    files = {"engine/client.py": lazy, "engine/core.py": "import torch"}
    assert plant(tmp_path, files) == []


@pytest.mark.parametrize(
    "back",
    [
        "from kvasir.kv.radix import Tree",
        "from kvasir.kv import radix",
        "def f():\n    from .radix import Tree",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvasir.kv.radix import Tree",
    ],
)
def test_modules_that_import_each_other_are_found(tmp_path, back):
    files = {"kv/radix.py": "\nfrom kvasir.kv.pins import Pins", "kv/pins.py": "from kvasir.kv import eviction as e"}
    found = plant(tmp_path, {**files, "kv/eviction.py": back})
    line = back.count("\n") + 1
    circle = "kvasir.kv.eviction -> kvasir.kv.radix -> kvasir.kv.pins -> kvasir.kv.eviction"
    assert found == [f"kv/eviction.py:{line}: these import each other: {circle}"]


def test_every_import_cycle_is_found_and_importing_the_own_package_is_none(tmp_path):
    files = {
        "kv/__init__.py": "from kvasir.kv.a import A",
        "kv/a.py": "from kvasir.kv.b import B",
        "kv/b.py": "import kvasir.kv.a",
        "sched/__init__.py": "",
        "sched/a.py": "from kvasir.sched import b",
        "sched/b.py": "from kvasir.sched.a import A",
    }
    found = plant(tmp_path, files)
    assert [line.partition(":")[0] for line in found] == ["kv/a.py", "sched/a.py"], found


def missing() -> list[str]:
    return list(checker.absent(ROOT / "src" / "kvasir", ROOT / "pyproject.toml"))


def test_the_tables_name_only_what_exists():
    assert missing() == []


@pytest.mark.parametrize(
    ("table", "key", "value", "message"),
    [
        ("ARROWS", "fleets", (), "names `fleets`, which does not exist"),
        ("ARROWS", "parse", ("engine.nothing",), "names `engine.nothing`, which"),
        ("DOORS", "ray", ("fleets/*",), "names fleets/*, which matches no file"),
    ],
)
def test_a_name_in_the_tables_that_does_not_exist_is_found(monkeypatch, capsys, table, key, value, message):
    monkeypatch.setitem(getattr(checker, table), key, value)
    monkeypatch.setattr(checker, "check", lambda package: [])
    assert checker.main([]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert message in first and last.endswith("1 violations")


def test_a_path_in_pyproject_that_does_not_exist_is_found(tmp_path):
    project = tmp_path / "pyproject.toml"
    text = (ROOT / "pyproject.toml").read_text().replace('include = ["src"]', 'include = ["src", "fleets"]')
    project.write_text(text)
    for name in ("src/kvasir/assets", "tests", "recipes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "src" / "kvasir" / "ops").mkdir()
    for name in ("launch", "kernels", "compiling", "triton", "triton_matrix"):
        (tmp_path / "src" / "kvasir" / "ops" / f"{name}.py").touch()
    found = list(checker.absent(ROOT / "src" / "kvasir", project))
    assert found == ["pyproject.toml names fleets, which does not exist"]


def test_the_command_prints_places_and_fails(tmp_path, capsys):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "pool.py").write_text("\nimport torch\n")
    assert checker.main([str(tmp_path)]) == 1
    assert f"{tmp_path}/kv/pool.py:2: kv -> torch" in capsys.readouterr().out
    (tmp_path / "kv" / "pool.py").write_text("")
    assert checker.main([str(tmp_path)]) == 0
    assert checker.main([str(tmp_path / "absent")]) == 2
