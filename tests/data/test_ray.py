"""kvasir.data on a real Ray: a job whose actors, driver and node are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kvasir.data.mapper import Mapper
from tests.data.ray_job import OPTIONS, PARAMS

COUNT = 400
ACTOR = "ray::MapWorker(MapBatches(Mapper))"

pytestmark = [pytest.mark.ray, pytest.mark.slow]


class Job:
    def __init__(self, folder: Path):
        self.folder, self.kept, self.output = folder, folder / "kept", folder / "out.json"
        rows = [{"i": i, "prompt": f"There once was a number {i}"} for i in range(COUNT)]
        self.rows = [{**row, "params": {"max_tokens": 12} if row["i"] % 3 else None} for row in rows]
        self.rows[5]["prompt"] = "x " * 1000  # does not fit
        (folder / "rows.json").write_text(json.dumps(self.rows))

    def begin(self) -> subprocess.Popen:
        home = {"HOME": str(self.folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
        paths = [str(Path(__file__).parents[2]), *(p for p in sys.path if p)]
        command = [sys.executable, "-m", "tests.data.ray_job", self.folder / "rows.json", self.kept, self.output, "2"]
        with open(self.folder / "log", "ab") as log:
            env = {**os.environ, **home, "PYTHONPATH": os.pathsep.join(paths)}
            return subprocess.Popen([*map(str, command)], env=env, stdout=log, stderr=log, start_new_session=True)

    @property
    def lines(self) -> list[str]:
        """The keys of the rows that are written down."""
        return [json.loads(line)["key"] for path in self.kept.glob("*.jsonl")
                for line in path.read_text().splitlines(True) if line.endswith("\n")]  # fmt: skip

    def until(self, driver: subprocess.Popen, count: int) -> None:
        while len(self.lines) < count:
            assert driver.poll() is None, (self.folder / "log").read_text()[-4000:]
            time.sleep(0.05)


def actors(driver: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            if ACTOR in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_all(driver: subprocess.Popen) -> None:
    """The driver, and the node that it made."""
    others = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    for process in others:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(others, 60)


@pytest.mark.filterwarnings("ignore")
def test_a_job_continues_after_any_death(tmp_path):
    job = Job(tmp_path)
    driver = job.begin()
    try:
        job.until(driver, 30)
        os.kill(actors(driver)[0].pid, signal.SIGKILL)
        job.until(driver, 120)
    finally:
        kill_all(driver)
    before = job.lines
    assert 120 <= len(before) < COUNT - 1, "it was killed in its midst"
    assert not job.output.exists()
    driver = job.begin()
    try:
        assert driver.wait(600) == 0, (tmp_path / "log").read_text()[-4000:]
    finally:
        if driver.poll() is None:
            kill_all(driver)
    assert set(Counter(job.lines).values()) == {1}, "no row was computed twice"
    assert len(job.lines) == COUNT - 1 and job.lines[: len(before)] != [] and set(before) <= set(job.lines)
    found = json.loads(job.output.read_text())
    with Mapper("kvasir-mini", sampling_params=PARAMS, params_column="params", **OPTIONS) as mapper:
        expected = list(mapper.answers(job.rows))
    assert [row["generated_tokens"] for row in found] == [row["generated_tokens"] for row in expected]
    assert [row["generated_text"] for row in found] == [row["generated_text"] for row in expected]
    assert [row["i"] for row in found if row["error"]] == [5] and "context" in found[5]["error"]
