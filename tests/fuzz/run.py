"""Runs targets in separate processes, to fuzz or to minimise, and reads their output."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from tests.fuzz.target import CORPUS, NAMES, load

ROOT = Path(__file__).parents[2]
WORK = ROOT / "build" / "fuzz"
NATIVE_CORPUS = ROOT / "csrc" / "fuzz" / "corpus"
SECONDS_OF_ONE = 10  # of one input
RSS_MB = 3000
MAX_INPUT = 4096


@dataclass(frozen=True)
class Job:
    """A target and how its process is begun; `seeds` are the inputs of the repository."""

    name: str
    command: tuple[str, ...]
    seeds: Path

    @property
    def grown(self) -> Path:
        """Inputs that this machine has found, kept from run to run."""
        return WORK / "corpus" / self.name


@dataclass(frozen=True)
class Outcome:
    job: Job
    runs: int
    features: int
    corpus: int
    crash: Path | None
    log: str

    @property
    def verdict(self) -> str:
        """FAILED: an input broke the promise. BLIND: no coverage was seen, so nothing guided the run."""
        return "FAILED" if self.crash else "held" if self.features else "BLIND"

    def line(self) -> str:
        reply = f"{self.runs:>9} runs, {self.features:>6} features, {self.corpus:>5} inputs"
        return f"{self.job.name:<16} {reply}  {self.verdict}"


def python_jobs() -> list[Job]:
    """None where atheris is not installed."""
    if find_spec("atheris") is None:
        return []
    return [Job(name, (sys.executable, "-m", "tests.fuzz.one", name), CORPUS / name) for name in NAMES]


def native_jobs() -> list[Job]:
    """The targets of csrc/fuzz that were built."""
    found = sorted((WORK / "native").glob("kvasir_fuzz_*"))
    names = [path.name.removeprefix("kvasir_fuzz_") for path in found if path.suffix == ""]
    paths = zip(names, found, strict=False)
    return [Job(f"native_{name}", (str(path),), NATIVE_CORPUS / name) for name, path in paths]


def fuzz(job: Job, seconds: int) -> Outcome:
    """Runs until the time is up or an input breaks the promise."""
    crashes = WORK / "crashes"
    for folder in (crashes, job.grown, job.seeds):
        folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{crashes}/{job.name}-"
    # On Linux a process begins with the peak of the one that started it.
    rss = RSS_MB + getrusage(RUSAGE_SELF).ru_maxrss // 1024
    limits = (f"-max_total_time={seconds}", f"-timeout={SECONDS_OF_ONE}", f"-rss_limit_mb={rss}")
    options = (*limits, f"-max_len={MAX_INPUT}", f"-artifact_prefix={prefix}", "-print_final_stats=1", *_words(job))
    process = _run(job, *options, str(job.grown), str(job.seeds), seconds=seconds + 300)
    log = process.stdout + process.stderr + f"it ended with status {process.returncode}\n"
    crash = re.search(rf"Test unit written to ({re.escape(prefix)}\S+)", log)
    path = Path(crash[1]) if crash else None
    if process.returncode and path is None:
        path = crashes / f"{job.name}-none"
        path.write_bytes(b"")
    runs = re.search(r"stat::number_of_executed_units:\s*(\d+)", log)
    shown = re.findall(r"ft: (\d+) corp: (\d+)", log)
    features, corpus = map(int, shown[-1]) if shown else (0, 0)
    return Outcome(job, int(runs[1]) if runs else 0, features, corpus, path, log)


def minimise(job: Job) -> int:
    """The fewest inputs, of the repository and of this machine, that reach all they reach, put into the repository.
    Returns how many. Files whose names say what they are stay in any case."""
    merged = WORK / "merged" / job.name
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    _run(
        job,
        "-merge=1",
        "-use_counters=0",
        f"-max_len={MAX_INPUT}",
        str(merged),
        str(job.seeds),
        str(job.grown),
        seconds=1200,
    )
    kept = {path.read_bytes() for path in job.seeds.glob("*.*")}
    for path in job.seeds.iterdir():
        if not path.suffix:
            path.unlink()
    for path in merged.iterdir():
        if path.read_bytes() not in kept:
            shutil.copyfile(path, job.seeds / path.name[:12])
    return len(list(job.seeds.iterdir()))


def _run(job: Job, *options: str, seconds: int) -> subprocess.CompletedProcess[str]:
    command = (*job.command, *options)
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds, cwd=ROOT, stdin=subprocess.DEVNULL
    )


_LOADING = threading.Lock()  # numpy fails if two threads import it for the first time at once


def _words(job: Job) -> tuple[str, ...]:
    """libFuzzer's option for a file with the target's dictionary."""
    if job.name not in NAMES:
        return ()
    with _LOADING:
        words = load(job.name).words
    if not words:
        return ()
    path = WORK / f"{job.name}.dict"
    data = (word if isinstance(word, bytes) else word.encode() for word in words)
    path.write_text("".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in data))
    return (f"-dict={path}",)
