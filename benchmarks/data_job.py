"""A long job of `kvasir.data` that dies again and again: nothing may be lost, computed twice or wrong.

    python -m benchmarks.data_job                        20,000 prompts, six deaths
    python -m benchmarks.data_job --prompts 1000000 --kills 20 --folder /data/job

The job is a process of its own (the driver) with `--engines` engines. At random numbers of finished rows an engine or
the driver is killed in turn; a driver is then started again, with the same checkpoint. In the end

- the output has each row once, in order, without an error,
- the checkpoint has each row once: what was finished before a death was not computed again,
- a sample of the rows has the same tokens when an engine computes it anew, in another order and batch.

Prints what was found, and the exit status is 1 if anything is wrong. Answers are drawn (temperature 1) with seeds that
follow from the rows. The folder may be that of an earlier run which was itself killed: the job then goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import psutil

import kvasir.data
from kvasir import SamplingParams
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.show import print_pairs
from kvasir.cli.simulate import report
from kvasir.data.mapper import Mapper

ROOT = Path(__file__).resolve().parents[1]
OPTIONS: dict[str, Any] = {"threads": 1, "num_blocks": 512, "max_model_len": 256, "max_num_seqs": 64}
NOUNS = ("fox", "dragon", "king", "tree", "river", "clock", "ship", "baker", "moon", "violin")
RECOVERED = 200  # rows after a death; the other engines may write some of them at once
LOOK = 0.05  # seconds between looks at the checkpoint
LOST = 600.0  # seconds without a new row, after which the job counts as stuck
ENGINE = "kvasir.engine.worker"


def prompts(count: int) -> Iterator[dict]:
    """Rows of different lengths, no two alike."""
    for i in range(count):
        yield {"i": i, "prompt": f"Number {i}: once there was a {NOUNS[i % 10]}" + " and another" * (i // 10 % 4)}


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=tokens)


# -- the driver ------------------------------------------------------------------------------------------------------


def drive(given: argparse.Namespace) -> None:
    """The job: its output appears when it is complete."""
    part = given.folder / "output.part"
    answers = kvasir.data.map(
        prompts(given.prompts), model=given.model, sampling_params=params(given.tokens), concurrency=given.engines,
        checkpoint=given.folder / "checkpoint", **OPTIONS,
    )  # fmt: skip
    with part.open("wb") as file:
        for row in answers:
            line = {name: row[name] for name in ("i", "generated_tokens", "error")}
            file.write(msgspec.json.encode(line) + b"\n")
    part.replace(given.folder / "output.jsonl")


# -- its deaths ------------------------------------------------------------------------------------------------------


class Written:
    """The rows that are in the checkpoint, by a look at what its files have got since the last."""

    def __init__(self, folder: Path):
        self._folder, self._read, self.rows, self.nbytes = folder, {}, 0, 0

    def look(self) -> int:
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            self.rows += new.count(b"\n")
            self.nbytes += len(new)
            self._read[path] = self._read.get(path, 0) + len(new)
        return self.rows


class Job:
    """deaths: what was killed, by kind. recovery: seconds from each death until RECOVERED more rows are written. peak:
    bytes of memory of the driver."""

    def __init__(self, given: argparse.Namespace):
        self.given = given
        self.deaths = {"engine": 0, "driver": 0}
        self.recovery: list[float] = []
        self.peak = 0
        self.written = Written(given.folder / "checkpoint")

    def run(self) -> None:
        """Returns when the job has ended. Raises RuntimeError if it fails or is stuck."""
        given, rng = self.given, random.Random(self.given.seed)
        most = self.written.look()
        points = sorted(rng.randrange(most, max(most + 1, given.prompts * 95 // 100)) for _ in range(given.kills))
        driver = self._start()
        try:
            for point, kind in zip(points, cycle(self.deaths), strict=False):
                if not self._until(driver, point):
                    break
                before = self.written.look()
                if kind == "driver":
                    _end(driver)
                    driver = self._start()
                elif not self._kill_engine(driver, rng):
                    continue
                self.deaths[kind] += 1
                begun = time.monotonic()
                self._until(driver, before + RECOVERED)
                self.recovery.append(time.monotonic() - begun)
            self._until(driver, None)
        finally:
            _end(driver)

    def _start(self) -> subprocess.Popen:
        flags = [
            f"--{name}={getattr(self.given, name)}" for name in ("prompts", "tokens", "engines", "model", "folder")
        ]
        command = [sys.executable, "-m", "benchmarks.data_job", "--driver", *flags]
        with (self.given.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def _until(self, driver: subprocess.Popen, rows: int | None) -> bool:
        """Whether so many rows are written; False if the driver ended before. None: until it ends."""
        last, changed = self.written.rows, time.monotonic()
        while rows is None or self.written.look() < rows:
            if driver.poll() is not None:
                if driver.returncode:
                    raise RuntimeError(f"the driver ended with status {driver.returncode}, see {self.given.folder}/log")
                return False
            with suppress(psutil.Error):
                self.peak = max(self.peak, psutil.Process(driver.pid).memory_info().rss)
            if self.written.rows != last:
                last, changed = self.written.rows, time.monotonic()
            if rows is not None and time.monotonic() - changed > LOST:
                raise RuntimeError(f"no new row for {LOST:.0f} s after {last} rows, see {self.given.folder}/log")
            time.sleep(LOOK)
        return True

    def _kill_engine(self, driver: subprocess.Popen, rng: random.Random) -> bool:
        engines = []
        for process in psutil.Process(driver.pid).children(recursive=True):
            with suppress(psutil.Error):
                if ENGINE in process.cmdline():
                    engines.append(process)
        if not engines:
            return False
        rng.choice(engines).kill()
        return True


def _end(driver: subprocess.Popen) -> None:
    """Kills the driver; its processes end by themselves. Raises RuntimeError if they do not."""
    others = []
    with suppress(psutil.Error):
        others = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    if alive := psutil.wait_procs(others, LOST)[1]:
        raise RuntimeError(f"processes of a driver that was killed are still there: {alive}")


# -- what must hold --------------------------------------------------------------------------------------------------


def problems(given: argparse.Namespace) -> list[str]:
    """What is wrong with the job that has ended."""
    found, sampled, chosen = [], {}, set(sample(given))
    count = 0
    with (given.folder / "output.jsonl").open("rb") as file:
        for count, line in enumerate(file, 1):
            row = msgspec.json.decode(line)
            if row["i"] != count - 1 or row["error"] or not row["generated_tokens"]:
                found.append(f"line {count} of the output is {line[:200]!r}")
            if row["i"] in chosen:
                sampled[row["i"]] = row["generated_tokens"]
    if count != given.prompts:
        found.append(f"the output has {count} rows, not {given.prompts}")
    keys: set[bytes] = set()
    lines = 0
    for path in (given.folder / "checkpoint").glob("*.jsonl"):
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    lines += 1
                    keys.add(bytes.fromhex(msgspec.json.decode(line)["key"]))
    if not lines == len(keys) == given.prompts:
        found.append(f"the checkpoint has {lines} rows with {len(keys)} keys, not {given.prompts}")
    return found[:20] + different(given, sampled)


def sample(given: argparse.Namespace) -> list[int]:
    return random.Random(given.seed + 1).sample(range(given.prompts), min(given.sample, given.prompts))


def different(given: argparse.Namespace, sampled: dict[int, list[int]]) -> list[str]:
    """The rows of the sample whose tokens are others when they are computed anew."""
    chosen = set(sampled)
    rows = [row for row in prompts(given.prompts) if row["i"] in chosen]
    random.Random(given.seed + 2).shuffle(rows)
    found = []
    with Mapper(given.model, sampling_params=params(given.tokens), **{**OPTIONS, "max_num_seqs": 7}) as mapper:
        for row in mapper.answers(rows):
            if list(row["generated_tokens"]) != sampled[row["i"]]:
                found.append(f"row {row['i']} has other tokens than when it is computed anew")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--tokens", type=int, default=8, help="most tokens of an answer")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--model", default="kvasir-mini")
    parser.add_argument("--kills", type=int, default=6, help="deaths, of an engine and of the driver in turn")
    parser.add_argument("--sample", type=int, default=500, help="rows that are computed anew in the end")
    parser.add_argument("--seed", type=int, default=0, help="of the deaths and of the sample")
    parser.add_argument("--folder", type=Path, help="for the checkpoint and the output (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    parser.add_argument("--driver", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.driver:
        return drive(given)
    with tempfile.TemporaryDirectory(prefix="kvasir-job-") as temporary:
        given.folder = (given.folder or Path(temporary)).absolute()
        given.folder.mkdir(parents=True, exist_ok=True)
        begun, job = time.monotonic(), Job(given)
        job.run()
        seconds = time.monotonic() - begun
        wrong = problems(given)
    figures = {
        "rows": given.prompts,
        "seconds": round(seconds, 1),
        "rows_per_s": round(given.prompts / seconds, 1),
        "deaths": job.deaths,
        "recovery_s": [round(one, 2) for one in job.recovery],
        "driver_peak_bytes": job.peak,
        "checkpoint_bytes": job.written.nbytes,
        "wrong": wrong,
    }
    print_pairs([(name, json.dumps(value)) for name, value in figures.items()])
    if given.out:
        options = {name: str(value) for name, value in vars(given).items() if name not in ("out", "driver", "folder")}
        facts = {"options": options, "machine": machine_facts(), "software": software_facts()}
        report.write_json(given.out / f"data-job-{time.strftime('%Y-%m-%d')}.json", facts | figures)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
