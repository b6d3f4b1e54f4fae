"""Tokens per second of a server whose engine takes no time, by number of API workers, and what each process spends.

    python -m benchmarks.api_workers --workers 1,2,3 --streams 64 --tokens 400 --out /tmp/out

The engine is the FakeRunner behind the real scheduler; the text half is the bundled model's. Clients read streams of
/v1/completions and do not decode them. `us_per_token` is the processor time of each kind of process, divided by all
tokens: `worker` of all API workers together, `main` of the process that owns the engine (of one process that does both,
without workers), `engine` of the fake engine's. Steps of many streams, or a main process that is behind, make tokens
cheaper, since they share frames and wake-ups. `bound` is what the API side could reach with a processor for each of its
processes: the reciprocal of the most expensive process's time per token.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.api_worker import MODEL
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.show import print_table
from kvasir.cli.simulate import report
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_text
from kvasir.engine.subprocess import ProcessEngine
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.server import run, run_in_loop
from kvasir.serve.settings import ServeSettings
from kvasir.serve.workers.main_process import MainProcess
from kvasir.serve.workers.spec import WorkerSpec, encode

ROOT = Path(__file__).resolve().parents[1]
MODULE, WORKER = "benchmarks.api_workers", "benchmarks.api_worker"
KINDS = ("main", "worker", "engine")
COLUMNS = ("workers", "tokens_per_s", *(f"{kind}_us" for kind in KINDS), "bound_per_s")
Run = dict[str, float]


def serve(count: int, rows: int) -> None:
    """Runs the server with `count` API workers; 0: in one process."""
    text = load_text(MODEL)
    assert text[0] is not None
    fake = {"vocab_size": text[0].vocab_size, "num_blocks": 64 * rows, "max_rows": rows, "max_model_len": 1024}
    engine = ProcessEngine(fake={**fake, "max_tokens_per_step": 64 + rows})
    settings = ServeSettings(port=0)
    catalogue = OneModel(Front(engine, *text), settings)
    if not count:
        return run(catalogue)

    def spec(number: int, listener: int, *, engine: Path, main: Path) -> bytes:
        return encode(WorkerSpec(number, count, listener, str(engine), str(main), 0, settings))

    run_in_loop(MainProcess(catalogue, count, WORKER, spec, 60.0).serve())


class Server:
    """A server process with `count` API workers."""

    def __init__(self, count: int, rows: int):
        command = [sys.executable, "-m", MODULE, "--serve", str(count), "--streams", str(rows)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout
        for line in self._process.stdout:
            if "/v1" in line:
                self.port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
                break
        else:
            raise SystemExit("the server does not start")
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                time.sleep(0.02)

    def spent(self) -> dict[str, list[float]]:
        """Seconds of processor time of each process, by kind."""
        main = psutil.Process(self._process.pid)
        found: dict[str, list[float]] = {"main": [_seconds(main)], "worker": [], "engine": []}
        for child in main.children():
            line = child.cmdline()
            kind = "engine" if "kvasir.engine.worker" in line else "worker" if WORKER in line else None
            if kind:
                found[kind].append(_seconds(child))
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def read_streams(port: int, streams: int, tokens: int) -> float:
    """Seconds until `streams` streams of as many tokens each are read."""
    body = {"prompt": "x", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    open_, begun = selectors.DefaultSelector(), time.perf_counter()
    for _ in range(streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        open_.register(sock, selectors.EVENT_READ, bytearray())
    while open_.get_map():
        for key, _ in open_.select():
            assert isinstance(key.fileobj, socket.socket)
            if chunk := key.fileobj.recv(1 << 18):
                key.data[:] = (key.data + chunk)[-64:]
                continue
            open_.unregister(key.fileobj)
            key.fileobj.close()
            assert b"[DONE]" in key.data, bytes(key.data)
    return time.perf_counter() - begun


def measure(count: int, streams: int, tokens: int, rounds: int) -> list[Run]:
    """The figures of each round after the first, which warms up."""
    server, runs = Server(count, streams), []
    try:
        for turn in range(rounds + 1):
            before = server.spent()
            seconds, total = read_streams(server.port, streams, tokens), streams * tokens
            after = server.spent()
            spent = {kind: [b - a for a, b in zip(before[kind], after[kind], strict=True)] for kind in KINDS}
            found = {f"{kind}_us": 1e6 * sum(spent[kind]) / total for kind in KINDS}
            slowest = max(*spent["main"], *(spent["worker"] or [0.0]))
            found |= {"workers": count, "tokens_per_s": total / seconds, "bound_per_s": total / slowest}
            if turn:
                runs.append(found)
    finally:
        server.stop()
    return runs


def draw(figure: Any, rows: Mapping[str, Run]) -> None:
    left, right = figure.subplots(1, 2)
    names = list(rows)
    left.bar(names, [rows[name]["tokens_per_s"] for name in names])
    left.plot(names, [rows[name]["bound_per_s"] for name in names], "o", color="black", label="bound")
    left.set_ylabel("tokens per second")
    left.legend()
    bottom = [0.0] * len(names)
    for kind in KINDS:
        values = [rows[name][f"{kind}_us"] for name in names]
        right.bar(names, values, bottom=bottom, label=kind)
        bottom = [a + b for a, b in zip(bottom, values, strict=True)]
    right.set_ylabel("processor time per token, µs")
    right.legend()
    for panel in (left, right):
        panel.set_xlabel("API workers (0: one process)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="0,1,2", help="numbers of API workers; 0: one process does all")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        return serve(args.serve, args.streams)
    runs = {n: measure(int(n), args.streams, args.tokens, args.rounds) for n in args.workers.split(",")}
    rows = {name: {key: median(run[key] for run in done) for key in COLUMNS} for name, done in runs.items()}
    print_table([f">{name}" for name in COLUMNS], [[f"{row[key]:.1f}" for key in COLUMNS] for row in rows.values()])
    if args.out:
        facts = {"machine": machine_facts(), "software": software_facts(), "options": vars(args) | {"out": None}}
        report.write(args.out, "api-workers", facts | {"rows": rows, "runs": runs}, lambda f: draw(f, rows))


if __name__ == "__main__":
    main()
