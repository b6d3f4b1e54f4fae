"""The numerics version changes with whatever may change bits, and with nothing else."""

import ast
import os
import subprocess
import sys

import pytest
import torch

from kvasir.device import libraries
from kvasir.device.capability import processor_flags
from kvasir.ops import native
from kvasir.runner import numerics
from kvasir.runner import probe as probe_module
from kvasir.runner.numerics import PACKAGE, SOURCE_PACKAGES, numerics_version, sources_digest
from kvasir.runner.probe import probe
from tests.engine.cores import random_model
from tests.test_arrows import checker

OPS = ("rms_norm native",)


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text)


def test_the_digest_of_sources(tmp_path):
    def digest():
        return sources_digest(tmp_path, ("ops", "layers"))

    write(tmp_path, ops__a="x = 1\n", ops__norm__native="y = 2\n", layers__b="z = 3\n", serve__c="w = 4\n")
    first = digest()
    assert digest() == first == sources_digest(tmp_path, ("layers", "ops"))
    seen = {first}
    for change in ({"ops__a": "x = 2\n"}, {"layers__b": "z = 3 \n"}, {"ops__norm__native": ""}, {"ops__new": ""}):
        write(tmp_path, **change)
        assert digest() not in seen, change
        seen.add(digest())
    (tmp_path / "layers/b.py").rename(tmp_path / "layers/d.py")
    assert digest() not in seen, "a name counts"
    last = digest()
    write(tmp_path, serve__c="w = 5\n")
    (tmp_path / "ops/notes.txt").write_text("no source")
    assert digest() == last, "other rooms and other files do not"
    with pytest.raises(AssertionError):
        sources_digest(tmp_path / "nowhere", SOURCE_PACKAGES)


def test_every_room_that_computes_counts():
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert set(SOURCE_PACKAGES) == rooms.intersection(checker.COMPUTING) - {"device"}


@pytest.mark.slow
def test_the_version_is_the_same_in_every_process():
    own = [numerics_version(executor, "a processor", OPS) for executor in ("program", "eager")]
    code = (
        "from kvasir.runner.numerics import numerics_version as version\n"
        f"print(*(version(e, 'a processor', {OPS}) for e in ('program', 'eager')))"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.split() == own
    assert len({*own}) == 2 and all(len(bytes.fromhex(digest)) == 32 for digest in own)


def test_the_version_covers_what_the_executor_depends_on(monkeypatch):
    def versions(device, op_table=OPS):
        return [numerics_version(executor, device, op_table) for executor in ("program", "eager")]

    program, eager = versions("a processor")
    assert versions("another")[0] == program and versions("another")[1] != eager
    assert versions("a processor", ())[0] == program and versions("a processor", ())[1] != eager
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "0.1")
        assert versions("a processor")[0] == program and versions("a processor")[1] != eager
    for module, name, value in (
        (probe_module, "probe", lambda kind: "other bits"),
        (libraries, "library_settings", lambda: {"MKL_CBWR": "COMPATIBLE"}),
        (libraries, "processor_flags", lambda: {"sse2"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert versions("a processor")[0] == program and versions("a processor")[1] != eager, name
    monkeypatch.setattr(numerics, "package_digest", lambda: "others")
    assert versions("a processor")[0] != program and versions("a processor")[1] != eager


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_the_library_reports_the_digest_of_its_sources(monkeypatch):
    assert len(bytes.fromhex(native.sources_digest())) == 32
    found = set()
    for name in native.ISAS:
        try:
            native.force_isa(name)
        except native.ConfigError:
            break
        found.add(numerics_version("program", "a processor", OPS))
    native.force_isa(None)
    assert len(found) == 1, "it does not depend on the instruction set"
    monkeypatch.setattr(native, "sources_digest", lambda: "of another build")
    assert numerics_version("program", "a processor", OPS) not in found


def differs() -> bool:
    return "avx512f" in processor_flags() and torch.backends.mkldnn.is_available()


# An engine over a folder: its version, the bits of its log-probabilities, and what it took from the folder.
RUN = """
import sys
from kvasir.environment import prepare_torch
prepare_torch()
from tests.engine.cores import core_of
from tests.oracle import mixed_requests, plain
from kvasir.sched.service import Service
Service.prefill_seconds = lambda self, start, tokens: 30.0  # for the tier, computing takes long
folder, disk = sys.argv[1:]
core = core_of(folder, executor="eager", dtype="bfloat16", threads=1, block_size=16, cache_dir=disk or None)
answers = plain(core, mixed_requests(300, 160, longest=100)[:4])
core.close(30.0)
stats = core.stats()
print([core.info.numerics, repr(answers), stats.tier_loaded_tokens, stats.tier_saves.get("saved", 0)])
"""


def engine_run(folder, disk: str = "", isa: str = "") -> list:
    environment = {name: value for name, value in os.environ.items() if "_CPU_ISA" not in name}
    environment |= {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    command = [sys.executable, "-c", RUN, folder, disk]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not differs(), reason="no instruction set beyond AVX2 for oneDNN to take or leave")
def test_blocks_of_libraries_that_compute_other_bits_are_not_used(tmp_path):
    """A folder written with the kernels of one instruction set is read by an engine with another instruction set."""
    made = tmp_path / "model"
    made.mkdir()
    folder, disk = random_model("llama", made), str(tmp_path / "kv")
    version, _, _, saved = engine_run(folder, disk)
    assert saved > 5
    expected = engine_run(folder, isa="AVX2")
    other = engine_run(folder, disk, isa="AVX2")
    assert other[0] == expected[0] != version
    assert other[2] == 0 and other[3] > 5, "nothing is taken, and its own blocks are kept"
    assert other[1] == expected[1]
    again = engine_run(folder, disk, isa="AVX2")
    assert again[2] > 0 and again[1] == expected[1], "its own blocks are"


@pytest.mark.slow
def test_the_probe_distinguishes_instruction_sets():
    """Where the processor has more than AVX2, and bfloat16 differs for it, no setting has to be known for that."""
    code = "from kvasir.runner.probe import probe; print(probe('cpu'))"

    def found(isa: str, threads: str) -> str:
        variables = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "OMP_NUM_THREADS": threads}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables).stdout

    usual = found("ALL", "1")
    assert usual == f"{probe('cpu')}\n", "neither process nor threads change it"
    assert not differs() or found("AVX2", "1") != usual
