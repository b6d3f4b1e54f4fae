"""A program that was never closed writes nothing when the interpreter exits."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")

from kvasir.ops import native
from tests.runner.made import files_of

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")

CODE = """
import sys
from contextlib import suppress
from kvasir.layers.kv_layout import KVLayout
from kvasir.program.cache import NativeCache
from kvasir.program.native import ThreadPool
from kvasir.program.program import Program
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.program_executor import ProgramExecutor
from kvasir.weights.find import find_model

model = load_model(find_model(sys.argv[1]), options=LoadOptions("program"))
spec = model.model.cache_spec()

def program():
    cache = NativeCache(spec, [4] * len(KVLayout.of(spec).groups), 16, "float32")
    return Program(model.trace, cache, max_tokens=16, max_rows=1, max_positions=64, threads=2)

early = program()
sys._kept = [program(), ProgramExecutor(model.model, program())]  # dropped after the modules are cleared
with suppress(Exception):
    ThreadPool("none")  # a pool that was never created
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_open_program_writes_nothing_at_exit(tmp_path):
    files_of(tmp_path)
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
