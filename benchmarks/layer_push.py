"""What is left to wait for when a prompt has been computed: its blocks sent layer by layer, and block by block.

    python -m benchmarks.layer_push qwen3-0.6b-Q4_K_M.gguf --prompts 512,2048 --rounds 5 --out benchmarks/results

Two engine processes with a computing thread each, over each way. `first` is the time from a request to its first
token, which the prefill engine computes; `wait` the time from there until the decode engine, which gets the request
then, has the next token: the rest of the transfer, loading the blocks, and one step; `second` is the time to that
token. Prompts are whole blocks, so the decode engine computes one token. `pieces` is the share of the blocks that were
sent layer by layer, `taken` that of the blocks that arrived. `least` is the shortest wait; the others are medians. Both
kinds have engines of their own and take turns, so that they meet the same neighbours.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
COLUMNS = ("way", "kind", "prompt", "first_ms", "wait_ms", "second_ms", "least_ms", "pieces", "taken")


@dataclass(frozen=True)
class Side:
    """The settings of one process. core: the only processor that it runs on, -1 for any. shared: whether memory is
    shared. grows: whether blocks are sent layer by layer."""

    options: EngineOptions
    core: int
    shared: bool
    grows: bool


def serve(side: Side, say: Connection) -> None:
    """An engine's process: computes the requests that it gets, one by one, until None."""
    if side.core >= 0:
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
        say.send(run(core, request) if isinstance(request, Request) else moved(exchange))
    core.close()


def moved(exchange: BlockExchange) -> tuple[int, int]:
    """Blocks that were sent in pieces so far, and taken, once nothing is under way."""
    while exchange.outbox.num_bytes:
        time.sleep(0.001)
    return exchange.outbox.stats.grown, exchange.inbox.stats().loads.get("loaded", 0)


def run(core: EngineCore, request: Request) -> tuple[float, float, list[int]]:
    """When the request began and had its first token; its ids."""
    begun, first, ids = time.perf_counter(), 0.0, list[int]()
    core.add(request)
    while core.has_work():
        for delta in core.step():
            first = first or time.perf_counter()
            ids += delta.token_ids
    return begun, first, ids


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


@dataclass
class Pair:
    """Two engines, the address of the second one, and sizes of their model. counts: of blocks sent in pieces, and
    taken."""

    prefill: Connection
    decode: Connection
    address: str
    block_size: int
    vocab: int
    counts: tuple[int, int] = (0, 0)


def ask(pair: Pair, name: str, prompt: int, rng: random.Random) -> dict[str, float]:
    """One request with a new prompt, handed over with its first token."""
    ids = tuple(rng.randrange(5, min(pair.vocab, 900)) for _ in range(prompt // pair.block_size * pair.block_size))
    params = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
    request = Request(name, ids, params)
    pair.prefill.send(replace(request, sends=Transfer(name, pair.address)))
    begun, first, tokens = pair.prefill.recv()
    whole = replace(request, params=replace(params, max_tokens=2), takes=Transfer(name))
    pair.decode.send(replace(whole, resume_ids=(tuple(tokens),), resume_carries=(b"",)))
    _, second, _ = pair.decode.recv()
    for side in (pair.prefill, pair.decode):
        side.send("moved")
    before, pair.counts = pair.counts, (pair.prefill.recv()[0], pair.decode.recv()[1])
    pieces, taken = ((a - b) * pair.block_size / len(ids) for a, b in zip(pair.counts, before, strict=True))
    times = {"first_ms": first - begun, "wait_ms": second - first, "second_ms": second - begun}
    return {name: 1000 * seconds for name, seconds in times.items()} | {"pieces": pieces, "taken": taken}


@contextmanager
def pair(given: argparse.Namespace, way: str, kind: str, folder: Path) -> Iterator[Pair]:
    """Two engines that exchange blocks in one way."""
    cores, shared = sorted(os.sched_getaffinity(0)) if given.pinned else [-1], way == WAYS[0]
    base = EngineOptions(
        given.model, max_num_seqs=4, max_num_batched_tokens=given.chunk, num_blocks=given.blocks, threads=1,
        speculate="off", overlap=True,
    )  # fmt: skip
    listen = str(folder / f"{way} {kind}" / "blocks")
    if way == WAYS[2]:
        base, listen = replace(base, transfer_key=f"{folder}/key", transfer_cert=f"{folder}/both.pem"), "127.0.0.1:0"
    with engine(Side(replace(base, role="decode", transfer_listen=listen), cores[-1], shared, True)) as decode:
        address, size, vocab = decode.recv()
        sends = replace(base, role="prefill", transfer_peer=(address,))
        with engine(Side(sends, cores[0], shared, kind == KINDS[1])) as prefill:
            prefill.recv()
            yield Pair(prefill, decode, address, size, vocab)


def measure(given: argparse.Namespace, way: str, folder: Path) -> list[dict]:
    """The rows of one way."""
    rng, rows = random.Random(1), list[dict]()
    with ExitStack() as stack:
        pairs = {kind: stack.enter_context(pair(given, way, kind, folder)) for kind in KINDS}
        for prompt in given.prompts:
            runs: dict[str, list[dict]] = {kind: [] for kind in KINDS}
            for i in range(given.rounds + 1):  # the first one warms up
                for kind, engines in pairs.items():
                    runs[kind].append(ask(engines, f"{kind} {prompt} {i}", prompt, rng))
            for kind, found in runs.items():
                middle = {name: median(one[name] for one in found[1:]) for name in COLUMNS[3:] if name != "least_ms"}
                least = min(one["wait_ms"] for one in found[1:])
                rows.append(
                    {"way": way, "kind": kind, "prompt": prompt, **middle, "least_ms": least, "runs": found[1:]}
                )
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
    parser.add_argument(
        "--pinned", action="store_true", help="each engine has only one core, also for sending; else they share all"
    )
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
