"""The program path runs where torch is not installed."""

import subprocess
import sys

import pytest

WITHOUT_TORCH = """
import importlib, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, NoTorch())
for name in sys.argv[1:]:
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


WAITS = pytest.mark.xfail(reason="the ops and the device's facts import torch", strict=False)


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(["kvasir.models.pooling", "kvasir.sampling.rows", "kvasir.sampling.carry"], id="pooling"),
        pytest.param(["kvasir.layers.kv_layout", "kvasir.layers.kv_memory"], id="kv_memory"),
        pytest.param(["kvasir.sampling.native"], id="sampling", marks=WAITS),
        pytest.param(["kvasir.layers.rope"], id="rope", marks=WAITS),
        pytest.param(["kvasir.program.native", "kvasir.program.cache"], id="cache", marks=WAITS),
        pytest.param(["kvasir.program.program", "kvasir.program.ranks"], id="program", marks=WAITS),
        pytest.param(["kvasir.runner.program_executor"], id="executor", marks=WAITS),
    ],
)
def test_modules_are_imported_without_torch(modules):
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *modules], check=True, timeout=120, capture_output=True)
