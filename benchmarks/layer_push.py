"""What is left to wait for when a prompt has been computed: its blocks sent layer by layer, and block by block.

    python -m benchmarks.layer_push qwen3-0.6b-Q4_K_M.gguf --prompts 512,2048 --rounds 5 --out benchmarks/results

Two engine processes with a thread and a core each, over each way. `first` is the time from a request to its first
token, which the prefill engine computes; `wait` the time from there until the decode engine, which gets the request
then, has the next token: the rest of the transfer, loading the blocks, and one step. Prompts are whole blocks, so the
decode engine computes one token. `pieces` is the share of the blocks that were sent layer by layer, `taken` that of the
blocks that arrived. Both kinds take turns within a round, so that they meet the same neighbours.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.show import print_table
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.kv.transfer.exchange import BlockExchange
from kvasir.runner.program_executor import ProgramExecutor
from kvasir.types import Request, SamplingParams, Transfer

WAYS = ("shared memory", "socket file", "TCP, TLS 1.3")
KINDS = ("block by block", "layer by layer")
COLUMNS = ("way", "kind", "prompt", "first_ms", "wait_ms", "pieces", "taken")


@dataclass(frozen=True)
class Side:
    """What one process is told. core: the processor that it runs on. shared: whether memory is shared. grows: whether
    blocks are sent layer by layer."""

    options: EngineOptions
    core: int
    shared: bool
    grows: bool


def serve(side: Side, say: Connection) -> None:
    """An engine's process: computes the requests that it gets, one by one, until None."""
    os.sched_setaffinity(0, {side.core})
    if not side.shared and hasattr(os, "memfd_create"):
        del os.memfd_create
    if not side.grows:
        ProgramExecutor.grows = property(lambda self: ())  # type: ignore[assignment]
    core = build_core(side.options)
    exchange = core.scheduler.tiering.exchange
    assert exchange
    while not exchange.ready:
        time.sleep(0.01)
    say.send((exchange.address, core.info.block_size, core.info.vocab_size))
    while (request := say.recv()) is not None:
        say.send(run(core, exchange, request))
    core.close()


def run(core: EngineCore, exchange: BlockExchange, request: Request) -> tuple[float, float, list[int], int, int]:
    """When the request began and had its first token; its ids; blocks sent in pieces so far, and taken."""
    begun, first, ids = time.perf_counter(), 0.0, list[int]()
    core.add(request)
    while core.has_work():
        for delta in core.step():
            first = first or time.perf_counter()
            ids += delta.token_ids
    return begun, first, ids, exchange.outbox.stats.grown, exchange.inbox.stats().loads.get("loaded", 0)


@contextmanager
def engine(side: Side) -> Iterator[Connection]:
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(side, there))
    process.start()
    try:
        yield here
    finally:
        here.send(None)
        process.join()


def ask(prefill: Connection, decode: Connection, address: str, name: str, ids: tuple[int, ...], size: int) -> dict:
    """One request, handed over with its first token."""
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
    request = Request(name, ids, params)
    prefill.send(replace(request, sends=Transfer(name, address)))
    begun, first, tokens, grown, _ = prefill.recv()
    whole = replace(request, params=replace(params, max_tokens=2), takes=Transfer(name))
    decode.send(replace(whole, resume_ids=(tuple(tokens),), resume_carries=(b"",)))
    _, second, _, _, taken = decode.recv()
    return {"first_ms": 1000 * (first - begun), "wait_ms": 1000 * (second - first), "grown": grown, "loaded": taken}


def measure(given: argparse.Namespace, way: str, folder: Path) -> list[dict]:
    """The rows of one way: both kinds have their own pair of engines, and take turns."""
    cores, rng, rows = sorted(os.sched_getaffinity(0)), random.Random(1), list[dict]()
    for kind in KINDS:
        base = EngineOptions(given.model, max_num_seqs=4, speculate="off", threads=1,
                             num_blocks=given.blocks, max_num_batched_tokens=given.chunk)  # fmt: skip
        secret = {"transfer_key": str(folder / "key"), "transfer_cert": str(folder / "both.pem")}
        listen = "127.0.0.1:0" if "TCP" in way else str(folder / f"run {way} {kind}" / "blocks")
        takes = replace(base, role="decode", transfer_listen=listen, **(secret if "TCP" in way else {}))
        shared = way == "shared memory"
        with engine(Side(takes, cores[-1], shared, True)) as decode:
            address, size, vocab = decode.recv()
            sends = replace(base, role="prefill", transfer_peer=(address,), **(secret if "TCP" in way else {}))
            with engine(Side(sends, cores[0], shared, kind == KINDS[1])) as prefill:
                prefill.recv()
                for prompt in given.prompts:
                    runs, before = list[dict](), (0, 0)
                    for i in range(given.rounds + 1):  # the first one warms up
                        ids = tuple(rng.randrange(5, min(vocab, 900)) for _ in range(prompt // size * size))
                        found = ask(prefill, decode, address, f"{way} {kind} {prompt} {i}", ids, size)
                        after = found.pop("grown"), found.pop("loaded")
                        shares = [(a - b) / (prompt // size) for a, b in zip(after, before, strict=True)]
                        before = after
                        runs.append(found | {"pieces": shares[0], "taken": shares[1]})
                    middle = {name: median(one[name] for one in runs[1:]) for name in COLUMNS[3:]}
                    rows.append({"way": way, "kind": kind, "prompt": prompt, **middle, "runs": runs[1:]})
    return rows


def secrets_in(folder: Path) -> None:
    """A key and a certificate."""
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=kvasir"
    where = ("-keyout", f"{folder}/key.pem", "-out", f"{folder}/cert.pem")
    subprocess.run(["openssl", *new.split(), *where], check=True, capture_output=True)
    both, key = folder / "both.pem", folder / "key"
    both.write_bytes((folder / "cert.pem").read_bytes() + (folder / "key.pem").read_bytes())
    key.write_bytes(b"a key for this benchmark\n")
    key.chmod(0o600)
    both.chmod(0o600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompts", default="512,2048", help="tokens; comma-separated list")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=200, help="of each engine's cache")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a step")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    given = parser.parse_args()
    given.prompts = [int(n) for n in given.prompts.split(",")]
    with tempfile.TemporaryDirectory() as name:
        secrets_in(Path(name))
        rows = [row for way in given.ways.split(";") for row in measure(given, way, Path(name))]
    shown = ([f"{v:.4g}" if isinstance(v := row[name], float) else str(v) for name in COLUMNS] for row in rows)
    print_table(["way", "kind", *[f">{name}" for name in COLUMNS[2:]]], shown)
    if given.out:
        facts = {
            "model": Path(given.model).stem,
            "machine": machine_facts(),
            "software": software_facts(),
            "rows": rows,
        }
        report.write_json(given.out / f"layer-push-{Path(given.model).stem}-{time.strftime('%Y-%m-%d')}.json", facts)


if __name__ == "__main__":
    main()
