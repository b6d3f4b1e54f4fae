"""Peers for tests: sound ones and hostile ones."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvasir.kv.peers import wire
from kvasir.kv.peers.tier import PeerTier
from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import StoredBlock
from kvasir.kv.tiers.disk import DiskTier
from kvasir.kv.transfer import frames
from kvasir.kv.transfer.block_socket import BlockSocket, WireError
from kvasir.kv.transfer.link import Address
from kvasir.kv.transfer.security import NO_CREDENTIALS
from tests.kv._tiers import FACTS, blocks_of, payload_of, until

BLOCK = blocks_of(2)[1]


@contextmanager
def asking(path: Path, **kwargs) -> Iterator[PeerTier]:
    tier = PeerTier(Address(path), kwargs.pop("facts", FACTS), **kwargs)
    try:
        yield tier
    finally:
        begin = time.monotonic()
        tier.close()
        assert time.monotonic() - begin < 8
        assert tier.stats().open_loads == 0


def keep(tier: DiskTier, blocks: list[StoredBlock], groups: tuple[int, ...] = (0,)) -> None:
    for block in blocks:
        for group in groups:
            tier.save(block, group, payload_of(block, group))
    until(lambda: all(tier.has([b.key for b in blocks], g) == len(blocks) for g in groups))
    until(lambda: tier.stats().queued_bytes == 0)


def welcome(link: BlockSocket) -> None:
    """The greeting of a server that believes everything."""
    said = bytes(link.body(link.head({frames.HELLO: frames.HELLO_BYTES})[1]))
    link.send(frames.CHALLENGE, bytes(32), NO_CREDENTIALS.proof(b"server", said, bytes(32)))
    link.body(link.head({frames.PROOF: 32})[1])
    link.send(frames.WELCOME)


@contextmanager
def hostile(path: Path, behave: Callable[[BlockSocket], None], greet: bool = True) -> Iterator[None]:
    """A server that welcomes everybody and then does what `behave` says."""
    done = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()
    listener.settimeout(0.02)

    def talk(sock: socket.socket) -> None:
        link = BlockSocket(sock)
        link.begin(30)
        with suppress(OSError, WireError):
            if greet:
                welcome(link)
            behave(link)
        link.close()

    def accept() -> None:
        talks = []
        while not done.is_set():
            with suppress(TimeoutError):
                talks.append(threading.Thread(target=talk, args=(listener.accept()[0],)))
                talks[-1].start()
        for thread in talks:
            thread.join()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    try:
        yield
    finally:
        done.set()
        acceptor.join()
        listener.close()
        path.unlink()


@contextmanager
def no_large_body(most: int) -> Iterator[None]:
    """Fails when anything longer than `most` is allocated for a frame or a record."""
    sizes = []
    real = bytearray

    def measured(*args):
        if args and isinstance(args[0], int):
            sizes.append(args[0])
            assert args[0] <= most
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "bytearray", measured, raising=False)
        patch.setattr(record, "bytearray", measured, raising=False)
        yield
    assert all(size <= most for size in sizes)
