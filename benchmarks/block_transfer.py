"""How fast blocks move from one engine to another, compared with memcpy.

    python benchmarks/block_transfer.py [--mib 0.25 2 8] [--total 512] [--repeats 3]

Two processes exchange parts through the outbox and the inbox that engines use: over a socket file with shared memory, a
socket file without, and TCP with TLS. Rates are of payload, from the first part put to the last one verified at the
receiver; processor time is that of both ends. The outbox and the inbox hold all parts, so neither end waits for an
engine. memcpy and CRC-32 are those of one thread over as many bytes; each byte is copied twice and checked twice on its
way through shared memory, the second time into new memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kvasir.kv.tiers.block import GroupFacts, StoreFacts, chain
from kvasir.kv.transfer.exchange import BlockExchange, ExchangeOptions
from kvasir.kv.transfer.link import parse_address
from kvasir.kv.transfer.security import Credentials
from kvasir.plan import pack_ids
from kvasir.types import Transfer

BLOCK_SIZE = 64
KEY = b"a key for this benchmark"


@dataclass
class Weights:
    value: str | None = "the same weights"

    def close(self) -> None: ...


@dataclass(frozen=True)
class Way:
    """name: of the way. tcp: whether over TCP. shared: whether memory is shared."""

    name: str
    tcp: bool = False
    shared: bool = True


WAYS = (Way("shared memory"), Way("socket file", shared=False), Way("TCP, TLS 1.3", tcp=True))


def facts_of(num_bytes: int) -> StoreFacts:
    return StoreFacts("", "n", BLOCK_SIZE, (GroupFacts("bytes", num_bytes),))


def receive(listen: str, cert: str, size: int, count: int, say: Connection) -> None:
    """The receiver's process: reports its address, then for each transfer when all of it is there."""
    options = ExchangeOptions(parse_address(listen), (), Credentials(KEY, Path(cert)), 2 * size * count)
    exchange = BlockExchange(facts_of(size), Weights(), options)
    say.send(exchange.address)
    while (name := say.recv()) is not None:
        exchange.inbox.expect(Transfer(name, seconds=600))
        say.send("expected")
        while not exchange.inbox.settled(name, 1.0):
            pass
        done, parts = time.perf_counter(), exchange.inbox.stats().num_parts
        exchange.inbox.forget(name)
        say.send((done, parts, time.process_time()))
    exchange.close(0.0)


def measure(way: Way, size: int, count: int, repeats: int, folder: Path, cert: str) -> tuple[float, float]:
    """The best rate in bytes per second, and the mean processor time of both ends in seconds per byte."""
    if not way.shared and hasattr(os, "memfd_create"):
        del os.memfd_create
    listen = "127.0.0.1:0" if way.tcp else str(folder / "run" / way.name.replace(" ", "-"))
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=receive, args=(listen, cert, size, count, there))
    process.start()
    address = here.recv()
    peers = (address,)
    exchange = BlockExchange(
        facts_of(size), Weights(), ExchangeOptions(None, peers, Credentials(KEY, Path(cert)), 2 * size * count)
    )
    best = used = before = 0.0
    payload = memoryview(os.urandom(size)).toreadonly()
    for turn in range(repeats + 1):  # the first one opens the link
        name = f"transfer {turn}"
        ids = pack_ids([turn * count * BLOCK_SIZE + i for i in range(count * BLOCK_SIZE)])
        blocks = chain(b"benchmark", ids, BLOCK_SIZE)
        here.send(name)
        here.recv()
        begun, busy = time.perf_counter(), time.process_time()
        assert exchange.outbox.open(Transfer(name, address, 600))
        for block in blocks:
            exchange.outbox.put(name, block, 0, payload)
        exchange.outbox.finish(name)
        done, parts, theirs = here.recv()
        assert parts == count, f"{parts} of {count} parts arrived"
        if turn:
            best = max(best, size * count / (done - begun))
            used += time.process_time() - busy + theirs - before
        before = theirs
    here.send(None)
    process.join()
    exchange.close(0.0)
    return best, used / repeats / (size * count)


def of_one_thread(size: int, total: int) -> tuple[float, float, float]:
    """The rates of memcpy, parts of `size` bytes one after another: into memory that was used before, and into new
    memory; and of CRC-32. total: bytes, more than the caches hold."""
    source, count = memoryview(os.urandom(total)), total // size
    pieces = [source[i * size : (i + 1) * size] for i in range(count)]
    used = [bytearray(piece) for piece in pieces]

    def copy() -> None:
        for target, piece in zip(used, pieces, strict=True):
            memoryview(target)[:] = piece

    def copy_anew() -> None:
        kept = [bytearray(piece) for piece in pieces]
        assert len(kept) == count

    def check() -> None:
        for piece in pieces:
            zlib.crc32(piece)

    return tuple(size * count / min(_seconds(work) for _ in range(3)) for work in (copy, copy_anew, check))  # type: ignore[return-value]


def _seconds(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=float, nargs="*", default=[0.25, 2, 8], help="MiB of a part")
    parser.add_argument("--total", type=int, default=512, help="MiB of a transfer")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, cert = Path(name), f"{name}/both.pem"
        new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=kvasir"
        where = ("-keyout", f"{name}/key.pem", "-out", f"{name}/cert.pem")
        subprocess.run(["openssl", *new.split(), *where], check=True, capture_output=True)
        Path(cert).write_bytes(Path(f"{name}/cert.pem").read_bytes() + Path(f"{name}/key.pem").read_bytes())
        for mib in given.mib:
            size = int(mib * 2**20)
            names = "memcpy GB/s", "memcpy to new memory GB/s", "CRC-32 GB/s"
            row = {"MiB of a part": mib}
            row |= {
                n: round(rate / 1e9, 2) for n, rate in zip(names, of_one_thread(size, given.total << 20), strict=True)
            }
            for way in WAYS:
                count = max(1, (given.total << 20) // size)
                # A process of its own: a way may take something away from `os`.
                read, write = multiprocessing.get_context("fork").Pipe(duplex=False)

                def work(way: Way = way, size: int = size, count: int = count, write: Connection = write) -> None:
                    write.send(measure(way, size, count, given.repeats, folder, cert))

                process = multiprocessing.get_context("fork").Process(target=work)
                process.start()
                rate, used = read.recv()
                process.join()
                row |= {f"{way.name} GB/s": round(rate / 1e9, 2), f"{way.name} CPU s/GB": round(used * 1e9, 2)}
            print(json.dumps(row), flush=True)
    assert threading.active_count() == 1


if __name__ == "__main__":
    main()
