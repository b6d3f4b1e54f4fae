"""The proof that the fuzzers can fail: faults are planted, and the harness must find and report them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvasir.errors import KvasirError
from tests.fuzz import __main__ as words
from tests.fuzz import run
from tests.fuzz.run import Job, fuzz
from tests.fuzz.target import Target, attempt, bounded_memory

SECONDS = 240  # for what is found in one or two on a quiet machine

# Beyond the word is what only guidance by coverage finds.
READER = """
import runpy, time
import atheris
from tests.fuzz import target

@atheris.instrument_func
def read(data):
    if data[:1] == b"f" and data[1:2] == b"a" and data[2:3] == b"u" and data[3:4] == b"l" and data[4:5] == b"t":
        {fault}

target.load = lambda name: target.Target(read)
runpy.run_module("tests.fuzz.one", run_name="__main__")
"""
PYTHON_FAULTS = {
    "raise KeyError('planted')": "KeyError: 'planted'",
    "time.sleep(3600)": "ERROR: libFuzzer: timeout",
    "bytearray(2 << 30)": "MemoryError",
}
NATIVE_FAULTS = {
    "h": "heap-buffer-overflow",
    "g": "SEGV on unknown address",  # the element after the array is on a protected page
    "u": "signed integer overflow",
    "r": "failed: planted",
    "t": "ERROR: libFuzzer: timeout",
}


def test_a_run_without_coverage_is_a_failure(tmp_path, monkeypatch):
    job = Job("schema", (sys.executable, "-c", ""), tmp_path)
    blind = run.Outcome(job, runs=1000, features=0, corpus=0, crash=None, log="")
    assert (blind.verdict, replace(blind, features=7).verdict) == ("BLIND", "held")
    monkeypatch.setattr(words, "chosen", lambda names: [job])
    monkeypatch.setattr(words, "fuzz", lambda job, seconds: blind)
    monkeypatch.setattr(sys, "argv", ["tests.fuzz"])
    assert words.main() == 1


def test_an_error_that_is_no_refusal_breaks_the_promise():
    def refuse(data: bytes) -> None:
        raise KvasirError(data.decode())

    attempt(Target(refuse), b"no such thing")
    with pytest.raises(AssertionError, match="says"):
        attempt(Target(refuse), b"")
    with pytest.raises(KeyError):
        attempt(Target(lambda data: {}[data]), b"planted")
    with bounded_memory(64 << 20), pytest.raises(MemoryError):
        attempt(Target(lambda data: bytearray(128 << 20)), b"")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's fuzzers keep what they find."""
    monkeypatch.setattr(run, "WORK", tmp_path / "fuzz")
    monkeypatch.setattr(run, "SECONDS_OF_ONE", 5)
    return tmp_path


def found(
    job: Job, message: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> bytes:
    """The failing input, after the verdict of the whole command. message: texts that may report the fault."""
    outcome = fuzz(job, SECONDS)
    assert outcome.crash, outcome.log[-2000:]
    assert any(words in outcome.log for words in message) and outcome.line().endswith("FAILED")
    monkeypatch.setattr(words, "chosen", lambda names: [job])
    monkeypatch.setattr(words, "fuzz", lambda job, seconds: outcome)
    monkeypatch.setattr(sys, "argv", ["tests.fuzz"])
    assert words.main() == 1
    assert f"{job.name} {outcome.crash}" in capsys.readouterr().out
    return outcome.crash.read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("atheris") is None, reason="atheris is not installed (make fuzz does so)")
@pytest.mark.parametrize(("fault", "message"), PYTHON_FAULTS.items())
def test_a_planted_fault_of_a_reader_is_found(fault, message, folder, monkeypatch, capsys):
    command = (sys.executable, "-c", READER.format(fault=fault), "planted")
    assert found(Job("planted", command, folder / "seeds"), (message,), monkeypatch, capsys).startswith(b"fault")


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of planted faults, with the flags of CMakeLists.txt."""
    program, source = tmp_path_factory.mktemp("native") / "planted", Path(__file__).with_name("planted.cpp")
    sanitizers = ("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all")
    flags = ("-std=c++17", "-O1", "-g", "-fno-exceptions", "-fno-rtti", *sanitizers)
    built = shutil.which("clang++") and subprocess.run(
        ("clang++", *flags, source, "-o", program), capture_output=True, text=True, check=False
    )
    if not built or "libclang_rt" in built.stderr:
        pytest.skip("needs clang with libFuzzer (Debian: apt-get install clang libclang-rt-14-dev)")
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_planted_fault_of_native_code_is_found(native, folder, monkeypatch, capsys):
    faults = tuple(NATIVE_FAULTS.values())
    data = found(Job("native_planted", (str(native),), folder / "seeds"), faults, monkeypatch, capsys)
    assert data.startswith(b"fault")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "message"), NATIVE_FAULTS.items())
def test_each_kind_of_native_fault_is_reported(kind, message, native, folder, monkeypatch, capsys):
    (folder / "seeds").mkdir()
    (folder / "seeds" / "planted").write_bytes(b"fault" + kind.encode())
    data = found(Job("native_planted", (str(native),), folder / "seeds"), (message,), monkeypatch, capsys)
    assert data.startswith(b"fault" + kind.encode())


@pytest.mark.slow
def test_the_peak_of_the_process_that_starts_a_fuzzer_is_not_held_against_it(native, folder, monkeypatch):
    monkeypatch.setattr(run, "RSS_MB", 500)
    assert bytearray(b"1") * (600 << 20)
    (folder / "seeds").mkdir()
    (folder / "seeds" / "planted").write_bytes(b"faultt")
    assert NATIVE_FAULTS["t"] in fuzz(Job("native_planted", (str(native),), folder / "seeds"), SECONDS).log
