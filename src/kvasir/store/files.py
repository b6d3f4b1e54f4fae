"""Files of the store: locking, atomic replacement, hashing, and removal restricted to the store."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from kvasir.errors import KvasirError

CHUNK = 4 << 20
_LOOK_SECONDS = 0.05  # between attempts to take a lock that another process holds


class Stopped(KvasirError):
    """A change of the store was stopped by its caller. Data pulled so far is kept for the next attempt."""

    def __init__(self) -> None:
        super().__init__("stopped", "run it again: it resumes where it stopped")


def check(stop: Event | None) -> None:
    """Raises Stopped if `stop` is set."""
    if stop is not None and stop.is_set():
        raise Stopped


def make_folder(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file of mode 0600 atomically: it is either complete or absent."""
    new = path.with_name(f".{path.name[:100]}.{secrets.token_hex(6)}")
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, stop: Event | None = None) -> Iterator[None]:
    """Waits for a lock that excludes other processes and threads, and holds it. Raises Stopped."""
    while (lock := try_lock(path)) is None:
        check(stop)
        time.sleep(_LOOK_SECONDS)
    try:
        yield
    finally:
        os.close(lock)


def try_lock(path: Path) -> int | None:
    """The open file of the lock, held until it is closed; None if another process or thread holds the lock."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file


def sha256_of(path: Path, saw: Callable[[int], None] = lambda count: None, stop: Event | None = None) -> str:
    """The SHA-256 in hexadecimal. saw: called with the number of bytes read so far. Raises Stopped, OSError."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK):
            check(stop)
            digest.update(data)
            done += len(data)
            saw(done)
    return digest.hexdigest()


def remove_folder(folder: Path, within: Path) -> None:
    """Removes a direct child of `within`, which must not be a link."""
    assert folder.parent == within and not folder.is_symlink()
    shutil.rmtree(folder, ignore_errors=True)
