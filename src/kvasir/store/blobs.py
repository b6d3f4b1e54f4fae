"""Files uploaded for a future model, each stored under its SHA-256."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from kvasir.errors import InvalidRequest
from kvasir.store.files import make_folder

_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
_SPARE_BYTES = 256 << 20  # bytes that must stay free on the disk
_FORGOTTEN_SECONDS = 24 * 3600.0


def parse_digest(text: str) -> str:
    """The 64 hexadecimal digits of "sha256:HEX". Raises InvalidRequest for another form."""
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise InvalidRequest(f"{text[:80]!r} is not a digest", "expected sha256: and 64 hexadecimal digits", "digest")
    return match[1].lower()


class Blobs:
    """Owns a folder. A blob is either complete and verified or absent."""

    def __init__(self, folder: Path):
        self._folder = folder

    def path(self, digest: str) -> Path:
        """The path of the blob, whether it exists or not. Raises InvalidRequest."""
        return self._folder / f"sha256-{parse_digest(digest)}"

    def has(self, digest: str) -> bool:
        return self.path(digest).is_file()

    def receive(self, digest: str) -> BlobWriter:
        path = self.path(digest)
        make_folder(self._folder)
        return BlobWriter(path)

    def remove(self, hexadecimal: str) -> None:
        (self._folder / f"sha256-{hexadecimal}").unlink(missing_ok=True)

    def sweep(self) -> None:
        """Removes blobs that no model uses and that are more than a day old."""
        for path in self._folder.glob("*") if self._folder.is_dir() else ():
            try:
                facts = path.stat()
            except FileNotFoundError:  # another process removed it
                continue
            if facts.st_nlink == 1 and time.time() - facts.st_mtime > _FORGOTTEN_SECONDS:
                path.unlink(missing_ok=True)


class BlobWriter:
    """Receives a blob: `with blobs.receive(digest) as writer: writer.write(...); writer.keep()`. Without `keep`, the
    file is removed."""

    def __init__(self, path: Path):
        self._path = path
        self._new = path.with_name(f"new-{secrets.token_hex(8)}")
        self._digest = hashlib.sha256()

    def __enter__(self) -> BlobWriter:
        self._file = os.fdopen(os.open(self._new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._new.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Raises InvalidRequest if the disk has no room for the data."""
        if shutil.disk_usage(self._path.parent).free < _SPARE_BYTES + len(data):
            raise InvalidRequest("the disk of the store is full", "remove models, or set KVASIR_MODELS elsewhere")
        self._digest.update(data)
        self._file.write(data)

    def keep(self) -> None:
        """Raises InvalidRequest if the bytes do not have the expected digest."""
        found = f"sha256-{self._digest.hexdigest()}"
        if found != self._path.name:
            raise InvalidRequest(f"the bytes have the digest {found}", f"expected {self._path.name}", "digest")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._new.replace(self._path)
