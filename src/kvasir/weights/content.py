"""Content hashes of weight files, computed in the background and remembered beside the models.

A file in a store of blobs has its SHA-256 in its name. The hash of any other file is computed once, on a thread that
rests as long as it works, and kept in a folder of hashes: under a name made of the file's path, size, inode and times,
so that a file that has changed has no entry.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

log = logging.getLogger("kvasir.weights")

CHUNK = 4 << 20  # bytes hashed at a time
HASH = re.compile(r"[0-9a-f]{64}")
BLOB = re.compile(r"(?:sha256-)?([0-9a-f]{64})")


class Stopped(Exception):
    """The hash is not wanted any more."""


def blob_content(path: Path) -> str | None:
    """The SHA-256 of a file in hexadecimal, if it is in a store of blobs, whose names have it. Raises OSError."""
    target = path.resolve(strict=True)
    blob = BLOB.fullmatch(target.name) if target.parent.name == "blobs" else None
    return blob and blob[1]


def known_content(path: Path, folder: Path) -> str | None:
    """The SHA-256 of a file in hexadecimal, if its name or the folder of hashes has it. Raises OSError."""
    if blob := blob_content(path):
        return blob
    target = path.resolve(strict=True)
    with suppress(OSError, UnicodeDecodeError):
        if not _private(folder):
            return None
        text = _entry(target, folder).read_bytes()[:65].decode().strip()
        return text if HASH.fullmatch(text) else None
    return None


def content_of(path: Path, folder: Path, stop: threading.Event) -> str:
    """The SHA-256 of a file in hexadecimal; hashes it if that is not known, and remembers it. Raises OSError, and
    Stopped once `stop` is set."""
    if known := known_content(path, folder):
        return known
    target, digest = path.resolve(strict=True), sha256()
    entry = _entry(target, folder)
    with open(target, "rb") as file:
        begun = time.monotonic()
        while data := file.read(CHUNK):
            digest.update(data)
            now = time.monotonic()
            if stop.wait(now - begun):  # half of the time of a processor is left to the engine
                raise Stopped
            begun = time.monotonic()
    if _entry(target, folder) != entry:
        raise OSError(f"{path} changed while it was hashed")
    _remember(entry, digest.hexdigest())
    return digest.hexdigest()


def identity_of(path: Path, folder: Path) -> str:
    """The content hash of a file if it is known, otherwise the facts by which a changed file is told apart. Raises
    OSError."""
    target = path.resolve(strict=True)
    return known_content(target, folder) or f"file {_entry(target, folder).name}"


def _entry(path: Path, folder: Path) -> Path:
    info = path.stat()
    facts = f"{path}\0{info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns} {info.st_ctime_ns}"
    return folder / sha256(facts.encode()).hexdigest()


def _private(folder: Path) -> bool:
    """Whether no other user could change what the folder says."""
    info = os.stat(folder)
    return info.st_uid == os.getuid() and not info.st_mode & 0o022


def _remember(entry: Path, digest: str) -> None:
    """Keeps a hash for later engines; a folder that cannot be written only costs them time."""
    with suppress(OSError):
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _private(entry.parent):
            return
        temporary = entry.with_name(f"tmp-{secrets.token_hex(8)}")
        temporary.write_text(digest + "\n")
        temporary.replace(entry)


class Contents:
    """The hashes of several files, and what `describe` makes of them, in `value` once they are known. Hashes on a
    thread of its own, unless all are known. folder: of hashes. None if a file cannot be read."""

    def __init__(self, paths: Sequence[Path], folder: Path, describe: Callable[[Callable[[Path], str]], str]):
        self._paths, self._folder, self._describe = tuple(paths), folder, describe
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.value: str | None = None
        try:
            known = {path: known_content(path, folder) for path in self._paths}
        except OSError as error:
            log.warning("the weights have no content hash: %s", error)
            return
        hashes = {path: digest for path, digest in known.items() if digest}
        if len(hashes) == len(known):
            self.value = describe(hashes.__getitem__)
            return
        self._thread = threading.Thread(target=self._run, name="kvasir-weights-hash", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            hashes = {path: content_of(path, self._folder, self._stop) for path in self._paths}
            self.value = self._describe(hashes.__getitem__)
        except Stopped:
            pass
        except OSError as error:
            log.warning("the weights have no content hash: %s", error)

    def wait(self, seconds: float) -> bool:
        """Waits at most this long for the hashes. Whether `value` is known."""
        if self._thread:
            self._thread.join(seconds)
        return self.value is not None

    def close(self) -> None:
        """Ends the thread. May be called again."""
        self._stop.set()
        if self._thread:
            self._thread.join()
