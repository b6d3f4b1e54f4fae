"""Checkpoint: the finished rows of a long job in a folder, by a hash of their content, so that the job continues after
any death.

    <folder>/<time>-<random>.jsonl        {"key": "<32 hexadecimal digits>", "row": {...}}, a line for each row

Each writer appends to a file of its own, which it locks, and a row is written as a whole line at once: what a dead
writer left is complete but for its last line, which readers ignore. Several processes, also on several machines with a
common folder, may write at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import secrets
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvasir.errors import ConfigError

log = logging.getLogger("kvasir")

KEY_BYTES = 16
MAX_LINE = 256 << 20  # bytes; longer lines are no rows
MOST_RECENT = 1 << 16  # rows; sorting them in with the others takes a moment
_SUFFIX = ".jsonl"


def content_key(content: Any) -> bytes:
    """A hash of plain values, the same in every process."""
    return hashlib.blake2b(msgspec.json.encode(content, order="deterministic"), digest_size=KEY_BYTES).digest()


class _Line(msgspec.Struct):
    key: str
    row: msgspec.Raw


class _Shard:
    """A file of rows. read: bytes of the lines that are known. done: its writer has ended, and all of it is known."""

    def __init__(self, path: Path, done: bool = False):
        self.path, self.done, self.read = path, done, 0

    def lines(self) -> Iterator[tuple[bytes, int, int]]:
        """(key, offset, bytes) of each row that is not known yet."""
        with open(self.path, "rb") as file:
            file.seek(self.read)
            while (line := file.readline(MAX_LINE)).endswith(b"\n"):
                begin, self.read = self.read, self.read + len(line)
                try:
                    key = bytes.fromhex(msgspec.json.decode(line, type=_Line).key)
                except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
                    key = b""
                if len(key) == KEY_BYTES:
                    yield key, begin, len(line)
                else:
                    log.warning("%s: skipping a damaged line at byte %d", self.path, begin)

    @property
    def is_held(self) -> bool:
        """Whether its writer lives."""
        file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(file)
        return False

    def row(self, offset: int, size: int) -> tuple[bytes, bytes]:
        """The key and the row of a line. Raises OSError, msgspec.MsgspecError if the file has been changed."""
        with open(self.path, "rb") as file:
            file.seek(offset)
            line = msgspec.json.decode(file.read(size), type=_Line)
        return bytes.fromhex(line.key), bytes(line.row)


class Checkpoint:
    """Of one process. A row takes 24 bytes of memory, and a recent one some hundred."""

    def __init__(self, folder: Path):
        """Makes the folder if there is none. Raises ConfigError."""
        self._folder = folder
        self._shards: dict[str, _Shard] = {}
        self._order: list[_Shard] = []
        self._recent: dict[bytes, tuple[int, int, int]] = {}  # (shard, offset, bytes), by key
        self._file: int | None = None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load()
        except OSError as error:
            raise ConfigError(
                f"checkpoint {folder}: {error.strerror}", "expected a folder that one can write"
            ) from None

    def _load(self) -> None:
        keys, shards, offsets, sizes = array("Q"), array("L"), array("Q"), array("L")
        for number, shard in self._found():
            for key, offset, size in shard.lines():
                keys.append(int.from_bytes(key[:8], "little"))
                shards.append(number)
                offsets.append(offset)
                sizes.append(size)
        order = np.argsort(np.frombuffer(keys, np.uint64), kind="stable") if keys else np.zeros(0, np.intp)
        self._keys = np.array(keys, np.uint64)[order]
        self._places = (
            np.array(shards, np.uint32)[order], np.array(offsets, np.uint64)[order], np.array(sizes, np.uint32)[order]
        )  # fmt: skip

    def _found(self) -> Iterator[tuple[int, _Shard]]:
        """The files with rows that may be new, oldest first, with their numbers."""
        names = sorted(entry.name for entry in os.scandir(self._folder) if entry.name.endswith(_SUFFIX))
        for name in names:
            if name not in self._shards:
                self._add_shard(_Shard(self._folder / name))
        for number, shard in enumerate(list(self._order)):
            if not shard.done:
                shard.done = not shard.is_held  # before it is read: what comes later is read the next time
                yield number, shard

    def _add_shard(self, shard: _Shard) -> int:
        self._shards[shard.path.name] = shard
        self._order.append(shard)
        return len(self._order) - 1

    def refresh(self) -> None:
        """Learns the rows of writers that have ended since. Raises OSError."""
        for number, shard in self._found():
            if shard.done:
                for key, offset, size in shard.lines():
                    self._remember(key, (number, offset, size))

    def _remember(self, key: bytes, place: tuple[int, int, int]) -> None:
        self._recent[key] = place
        if len(self._recent) < MOST_RECENT:
            return
        keys = np.fromiter((int.from_bytes(k[:8], "little") for k in self._recent), np.uint64, len(self._recent))
        keys = np.concatenate((self._keys, keys))
        order = np.argsort(keys, kind="stable")  # of equal keys the latest row is the last
        recent = np.array([*self._recent.values()], np.uint64).T
        both = [np.concatenate((old, new.astype(old.dtype))) for old, new in zip(self._places, recent, strict=True)]
        self._keys, self._places = keys[order], (both[0][order], both[1][order], both[2][order])
        self._recent.clear()

    def get(self, key: bytes) -> bytes | None:
        """The row of this key, as JSON: the latest if there are several. Raises OSError."""
        for place in self._candidates(key):
            try:
                found, row = self._order[place[0]].row(*place[1:])
            except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
                continue
            if found == key:
                return row
        return None

    def _candidates(self, key: bytes) -> Iterator[tuple[int, int, int]]:
        if key in self._recent:
            yield self._recent[key]
        short = np.uint64(int.from_bytes(key[:8], "little"))
        first, end = (int(np.searchsorted(self._keys, short, side)) for side in ("left", "right"))
        for i in reversed(range(first, end)):
            shard, offset, size = (int(column[i]) for column in self._places)
            yield shard, offset, size

    def add(self, key: bytes, row: bytes) -> None:
        """Appends a row of JSON, without line breaks. Raises OSError, after which nothing was added."""
        if self._file is None:
            self._file = self._create()
        line = b'{"key":"%s","row":%s}\n' % (key.hex().encode(), row)
        before = os.fstat(self._file).st_size
        left = memoryview(line)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, before)  # so that the next row begins on a new line
            raise
        self._remember(key, (self._own, before, len(line)))

    def _create(self) -> int:
        """Opens a file of this writer, locked."""
        path = self._folder / f"{time.time_ns():020d}-{secrets.token_hex(8)}{_SUFFIX}"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        self._own = self._add_shard(_Shard(path, done=True))
        return file

    def close(self) -> None:
        """Makes all rows durable, and ends the writer."""
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None
