"""Seconds from a command to what its user waits for, and the memory of the processes, in turns with other programs.

    python benchmarks/startup.py
    python benchmarks/startup.py --model qwen3-0.6b-Q4_K_M.gguf --llama .peers/llama-build/bin/llama-server
    python benchmarks/startup.py --against ../before

| figure | from the start of the process to |
|---|---|
| `library` | `LLM(model)` has returned, in a new Python process |
| `run` | the first character of `kvasir run MODEL hi --no-chat` |
| `health` | /health of `kvasir serve` answers 200 |
| `serve` | the first token by HTTP has arrived |

`engine` is the engine's own report of its time to ready. `memory` is the proportional set size of all processes of
`serve` after that token, in MiB, without the weights; few blocks of the KV cache have been touched by then. Files are
in the page cache: the first round is not counted.

--against: a checkout of another commit with its .venv. --llama: llama-server, with a context of --context tokens; its
memory includes the mapped weights, which are subtracted, and its KV cache.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("engine", "library", "run", "health", "serve", "memory")
LIBRARY = "import sys; from kvasir import LLM; llm = LLM(sys.argv[1], progress=False); print(llm.summary)"
TIMEOUT = 600.0  # seconds

Figures = dict[str, float]


@dataclass(frozen=True)
class Kvasir:
    """A checkout and its environment."""

    folder: Path
    model: str

    @property
    def _bin(self) -> Path:
        return self.folder / ".venv" / "bin"

    def measure(self) -> Figures:
        found = self._library()
        found["run"] = self._run()
        with serving([str(self._bin / "kvasir"), "serve", self.model, "--verbose"]) as server:
            weights = int(re.search(r"weights (\d+) MiB", server.lines())[1])  # type: ignore[index]
            return found | server.first_token(self.model, weights)

    def _library(self) -> Figures:
        begun = time.perf_counter()
        command = [str(self._bin / "python"), "-c", LIBRARY, self.model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            line = process.stdout.readline()
            seconds = time.perf_counter() - begun
        return {"engine": float(re.search(r"in ([\d.]+) s", line)[1]), "library": seconds}  # type: ignore[index]

    def _run(self) -> float:
        begun = time.perf_counter()
        command = [str(self._bin / "kvasir"), "run", self.model, "hi", "--no-chat", "--max-tokens", "8"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout
            process.stdout.read(1)
            seconds = time.perf_counter() - begun
            process.stdout.read()
        return seconds


@dataclass(frozen=True)
class LlamaServer:
    binary: Path
    model: str
    context: int

    def measure(self) -> Figures:
        with serving([str(self.binary), "-m", self.model, "-c", str(self.context)]) as server:
            return server.first_token(self.model, Path(self.model).stat().st_size >> 20)


class Server:
    """A server's process, from its start."""

    def __init__(self, command: list[str], log: Path):
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
        self.base, self._log = f"http://127.0.0.1:{port}", log
        self._begun = time.perf_counter()
        with log.open("w") as file:
            self.process = subprocess.Popen([*command, "--port", str(port)], stdout=file, stderr=file)
        while not self._answers():
            if self.process.poll() is not None or time.perf_counter() - self._begun > TIMEOUT:
                raise SystemExit(f"{command[0]} does not serve: {self.lines()[-1000:]}")
            time.sleep(0.02)  # polling takes processor time from the server
        self._health = time.perf_counter() - self._begun

    def lines(self) -> str:
        return self._log.read_text()

    def first_token(self, model: str, weights: int) -> Figures:
        """The figures of a server. weights: MiB."""
        body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.base}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
            reply.read()
        seconds = time.perf_counter() - self._begun
        return {"health": self._health, "serve": seconds, "memory": self._memory() - weights}

    def _memory(self) -> float:
        """MiB."""
        first = psutil.Process(self.process.pid)
        return sum(each.memory_full_info().pss for each in (first, *first.children(recursive=True))) / 2**20

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/health", timeout=5) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    log = Path(f"/tmp/kvasir-startup-{os.getpid()}.log")
    server = Server(command, log)
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait()
        log.unlink()


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'':14}" + "".join(f"{name:>9}" for name in FIGURES) + "   seconds; MiB")
    for name, row in rows.items():
        cells = (f"{row['median'][figure]:9.2f}" if figure in row["median"] else f"{'':9}" for figure in FIGURES)
        print(f"{name:14}{''.join(cells)}")


def draw(figure: Any, rows: Mapping[str, Mapping[str, Any]]) -> None:
    panel, times = figure.subplots(), FIGURES[:-1]
    for i, (name, row) in enumerate(rows.items()):
        has = [figure for figure in times if figure in row["median"]]
        places = [times.index(figure) + 0.25 * i for figure in has]
        panel.bar(places, [row["median"][figure] for figure in has], 0.23, label=name)
    panel.set_xticks([x + 0.25 for x in range(len(times))], times)
    panel.set_ylabel("seconds")
    panel.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="kvasir-mini")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path, help="a checkout of another commit")
    parser.add_argument("--llama", type=Path, help="llama-server")
    parser.add_argument("--context", type=int, default=4096, help="of llama-server, which allocates all of it")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    args = parser.parse_args()
    programs: dict[str, Kvasir | LlamaServer] = {"kvasir": Kvasir(ROOT, args.model)}
    if args.against:
        programs["before"] = Kvasir(args.against.resolve(), args.model)
    if args.llama:
        programs["llama-server"] = LlamaServer(args.llama, args.model, args.context)
    runs: dict[str, list[Figures]] = {name: [] for name in programs}
    for turn in range(args.rounds + 1):
        for name in list(programs)[:: -1 if turn % 2 else 1]:
            found = programs[name].measure()
            if turn:
                runs[name].append(found)
        print(f"round {turn} of {args.rounds}", file=sys.stderr)
    rows = {name: {"median": {key: median(run[key] for run in done) for key in done[0]}, "runs": done}
            for name, done in runs.items()}  # fmt: skip
    show(rows)
    if args.out:
        facts = {"machine": machine_facts(), "software": software_facts(), "model": Path(args.model).name}
        report.write(args.out, f"startup-{Path(args.model).stem}", facts | {"rows": rows}, lambda f: draw(f, rows))


if __name__ == "__main__":
    main()
