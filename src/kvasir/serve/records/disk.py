"""Storage of records: in memory, or in a folder of files, each written to a temporary name and then renamed."""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import re
import weakref
from pathlib import Path
from typing import BinaryIO

from kvasir.errors import ConfigError

log = logging.getLogger("kvasir.serve")

ID = re.compile(r"[a-z]{1,16}_[0-9a-f]{48}")
_SUFFIX = ".json"


class MemoryStorage:
    def __init__(self) -> None:
        self._data: dict[tuple[str, str], bytes] = {}

    def all(self) -> list[tuple[str, str, int, float]]:
        return []

    def close(self) -> None:
        self._data.clear()

    def write(self, place: str, id: str, data: bytes, used: float) -> None:
        self._data[place, id] = data

    def read(self, place: str, id: str, used: float | None) -> bytes | None:
        return self._data.get((place, id))

    def open(self, place: str, id: str) -> BinaryIO | None:
        data = self._data.get((place, id))
        return None if data is None else io.BytesIO(data)

    def remove(self, place: str, ids: list[str]) -> None:
        for id in ids:
            self._data.pop((place, id), None)


class FolderStorage:
    def __init__(self, folder: Path):
        self._folder = folder
        _make(folder, parents=True)
        self.close = weakref.finalize(self, os.close, _locked(folder / ".lock"))

    def all(self) -> list[tuple[str, str, int, float]]:
        """(place, id, bytes, last use) of the records on disk. Removes partly written files of an earlier server."""
        found = []
        for place in os.scandir(self._folder):
            if not place.is_dir(follow_symlinks=False):
                continue
            for file in os.scandir(place.path):
                id, suffix = os.path.splitext(file.name)
                if suffix == _SUFFIX and ID.fullmatch(id) and file.is_file(follow_symlinks=False):
                    facts = file.stat(follow_symlinks=False)
                    found.append((place.name, id, facts.st_size, facts.st_mtime))
                elif suffix == ".part":
                    os.unlink(file.path)
        return found

    def write(self, place: str, id: str, data: bytes, used: float) -> None:
        folder = self._folder / place
        try:
            _make(folder)
        except ConfigError as error:
            raise OSError(str(error)) from None
        part, path = folder / f"{id}.part", folder / f"{id}{_SUFFIX}"
        try:
            with open(part, "wb", opener=_open_private) as file:
                file.write(data)
                file.flush()
                os.utime(file.fileno(), (used, used))
                os.fsync(file.fileno())
            os.replace(part, path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read(self, place: str, id: str, used: float | None) -> bytes | None:
        file = self.open(place, id)
        if file is None:
            return None
        path = self._folder / place / f"{id}{_SUFFIX}"
        try:
            with file:
                data = file.read()
            if used is not None:
                os.utime(path, (used, used))
        except OSError as error:
            log.warning("%s: %s", path, error.strerror)
            return None
        return data

    def open(self, place: str, id: str) -> BinaryIO | None:
        path = self._folder / place / f"{id}{_SUFFIX}"
        try:
            return open(path, "rb", opener=_open_plain)
        except OSError as error:
            log.warning("%s: %s", path, error.strerror)
            return None

    def remove(self, place: str, ids: list[str]) -> None:
        for id in ids:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._folder / place / f"{id}{_SUFFIX}")


def _make(folder: Path, parents: bool = False) -> None:
    """Creates a folder with access for this user only, or checks that it is one. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=parents, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", "expected a folder for stored records") from None
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
        raise ConfigError(
            f"{folder} is a link, or accessible to other users", f"give a folder of your own: chmod 700 {folder}"
        )


def _locked(path: Path) -> int:
    """The descriptor of a file, which it locks while open. Raises ConfigError if another server holds the lock."""
    file = _open_private(str(path), os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(f"{path.parent} is used by another server", "give each a folder of its own") from None
    return file


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC)
