"""Files of packed weights: the matrices of a model's layers in the form that kernels read, one layer after another.

A model that is larger than memory is packed into such a file once. Beside `KEY.weights` lies `KEY.json`, its index,
written last and sealed with a hash: what it does not describe exactly was not completed, and is written again. Layers
begin at whole pages, so that they can be read past the page cache. All reads are of whole layers and verified: each
chunk of a layer has a checksum.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvasir.errors import ConfigError
from kvasir.weights.packed_names import set_of

ALIGN = 4096  # bytes: of layers and matrices in a file, and of the memory that they are read into
CHUNK = 8 << 20  # bytes that are read and verified at a time
READERS = 2  # chunks that are read at once
KEPT = 2  # sets of files of a model, the one in use included
MAX_INDEX_BYTES = 256 << 20
_FLUSHED = 256 << 20  # bytes that are written before they are put on the disk
_SPARE = 1 << 30  # bytes of the disk that stay free


class Damaged(Exception):
    """A file does not hold what was written to it, or cannot be read; the message says which and how."""


class StoredMatrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A packed matrix in a file (ops.linear.packed.PackedMatrix). offset: of its bytes in the layer."""

    name: str
    layer: int
    offset: int
    nbytes: int
    format: str
    rows: int
    cols: int
    segments: int
    activation: str
    scale: float
    note: str


class StoredLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer in a file: whole pages from `offset` on. checks: a CRC-32 of each chunk."""

    number: int
    offset: int
    nbytes: int
    checks: tuple[int, ...]


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file of `nbytes`."""

    key: str
    nbytes: int
    layers: tuple[StoredLayer, ...]
    matrices: tuple[StoredMatrix, ...]

    def fits(self) -> bool:
        """Whether every layer lies in the file, and every matrix in its layer."""
        layers = {layer.number: layer for layer in self.layers}
        return (
            len(layers) == len(self.layers)
            and len({matrix.name for matrix in self.matrices}) == len(self.matrices)
            and all(_layer_fits(layer, self.nbytes) for layer in self.layers)
            and all(m.layer in layers and _matrix_fits(m, layers[m.layer]) for m in self.matrices)
        )


def _layer_fits(layer: StoredLayer, nbytes: int) -> bool:
    whole = layer.offset % ALIGN == 0 and layer.nbytes % ALIGN == 0
    chunks = -(-layer.nbytes // CHUNK) == len(layer.checks)
    return whole and chunks and 0 < layer.nbytes <= nbytes and 0 <= layer.offset <= nbytes - layer.nbytes


def _matrix_fits(matrix: StoredMatrix, layer: StoredLayer) -> bool:
    whole = matrix.offset % ALIGN == 0
    return whole and 0 < matrix.nbytes <= layer.nbytes and 0 <= matrix.offset <= layer.nbytes - matrix.nbytes


class PackedFile:
    """An open file of packed weights. matrices: by name; layers: by number. Any thread may read."""

    def __init__(self, path: Path, index: Index):
        """Raises OSError."""
        self.path, self.nbytes = path, index.nbytes
        self.matrices: Mapping[str, StoredMatrix] = {matrix.name: matrix for matrix in index.matrices}
        self.layers: Mapping[int, StoredLayer] = {layer.number: layer for layer in index.layers}
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != index.nbytes:
                raise OSError(errno.EINVAL, "not the file that its index describes", str(path))
            self._direct_fd = _open_direct(path)
        except OSError:
            os.close(self._fd)
            raise
        self._is_direct = self._direct_fd >= 0
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="kvasir-weights")

    def read(self, number: int, memory: np.ndarray) -> None:
        """Reads a layer into the first bytes of `memory`, uint8 from a page on. Raises Damaged, and then removes the
        index: the next start writes the file again."""
        layer, view = self.layers[number], memory.data
        try:
            chunks = enumerate(layer.checks)
            for _ in self._readers.map(lambda chunk: self._chunk(layer, chunk[0], chunk[1], view), chunks):
                pass
        except Damaged:
            with contextlib.suppress(OSError):
                self.path.with_suffix(".json").unlink()
            raise

    def _chunk(self, layer: StoredLayer, at: int, check: int, memory: memoryview) -> None:
        begin = at * CHUNK
        view = memory[begin : min(begin + CHUNK, layer.nbytes)]
        for last in (False, True):  # what a bus has damaged is read once more
            problem = self._bytes(layer.offset + begin, view)
            if not problem and zlib.crc32(view) == check:
                return
            if last:
                what = problem or "the checksum is wrong: it has changed since it was written"
                raise Damaged(f"layer {layer.number} cannot be read from {self.path}: {what}")

    def _bytes(self, offset: int, view: memoryview) -> str:
        """Fills the view; returns what was wrong, or ""."""
        done = 0
        while done < len(view):
            try:
                fd = self._direct_fd if self._is_direct else self._fd
                count = os.preadv(fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and self._is_direct:  # this disk wants another alignment
                    self._is_direct = False
                    continue
                return error.strerror or str(error)
            if not count:
                return "the file has been truncated"
            done += count
        if not self._is_direct and hasattr(os, "posix_fadvise"):  # the window is the only copy in memory
            os.posix_fadvise(self._fd, offset, len(view), os.POSIX_FADV_DONTNEED)
        return ""

    def close(self) -> None:
        """Closes the file, after the reads in progress."""
        self._readers.shutdown()
        for fd in {self._fd, self._direct_fd} - {-1}:
            os.close(fd)
        self._fd = self._direct_fd = -1


def _open_direct(path: Path) -> int:
    """A descriptor that reads past the page cache; -1 if the file system has none."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
    except (OSError, AttributeError):
        return -1


class PackedWriter:
    """Writes a file of packed weights. layers: numbers of those begun. Nothing is seen of it before `finish`."""

    def __init__(self, folder: Path, key: str):
        """Raises OSError."""
        self._path, self._key = folder / f"{key}.weights", key
        self._temporary = folder / f"{key}.part"
        self._temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.fdopen(os.open(self._temporary, flags, 0o600), "wb", buffering=0)
        self._at = self._begin = self._check = self._flushed = 0
        self._checks: list[int] = []
        self._layers: list[StoredLayer] = []
        self._matrices: list[StoredMatrix] = []
        self.layers: set[int] = set()
        self._open: int | None = None

    def takes(self, layer: int) -> bool:
        """Whether a matrix of this layer can be added: layers are written one after another."""
        return layer == self._open or layer not in self.layers

    def add(self, name: str, layer: int, memory: np.ndarray, **facts: Any) -> None:
        """Writes a matrix. facts: the other fields of StoredMatrix. Raises OSError."""
        if layer != self._open:
            self._end_layer()
            self._open, self._begin = layer, self._at
            self.layers.add(layer)
        self._matrices.append(StoredMatrix(name, layer, self._at - self._begin, memory.nbytes, **facts))
        self._write(memory.data)
        self._write(memoryview(bytes(-self._at % ALIGN)))

    def _write(self, data: memoryview) -> None:
        while len(data):
            room = CHUNK - (self._at - self._begin) % CHUNK
            count = self._file.write(data[:room])
            self._check = zlib.crc32(data[:count], self._check)
            self._at, data = self._at + count, data[count:]
            if (self._at - self._begin) % CHUNK == 0:
                self._end_chunk()
        if self._at - self._flushed >= _FLUSHED:
            self._flush()

    def _end_chunk(self) -> None:
        self._checks.append(self._check)
        self._check = 0

    def _end_layer(self) -> None:
        if self._open is None:
            return
        if (self._at - self._begin) % CHUNK:
            self._end_chunk()
        self._layers.append(StoredLayer(self._open, self._begin, self._at - self._begin, tuple(self._checks)))
        self._checks, self._open = [], None

    def _flush(self) -> None:
        """Puts what is written on the disk, and takes it out of the page cache."""
        os.fsync(self._file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, self._at, os.POSIX_FADV_DONTNEED)
        self._flushed = self._at

    def finish(self) -> PackedFile:
        """Completes the file and opens it. Raises OSError."""
        self._end_layer()
        self._flush()
        self._file.close()
        index = Index(self._key, self._at, tuple(self._layers), tuple(self._matrices))
        self._temporary.replace(self._path)
        _write_index(self._path.with_suffix(".json"), index)
        return PackedFile(self._path, index)

    def abandon(self) -> None:
        """Removes what was written."""
        self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def _write_index(path: Path, index: Index) -> None:
    text = msgspec.json.encode(index)
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(sha256(text).hexdigest().encode() + b"\n" + text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def open_packed(folder: Path, key: str) -> PackedFile | None:
    """The complete file of this key in the folder; None if there is none."""
    path = folder / f"{key}.weights"
    try:
        with path.with_suffix(".json").open("rb") as file:
            data = file.read(MAX_INDEX_BYTES)
        seal, _, text = data.partition(b"\n")
        if seal != sha256(text).hexdigest().encode():
            return None
        index = msgspec.json.decode(text, type=Index)
        return PackedFile(path, index) if index.key == key and index.fits() else None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


@contextmanager
def packed_folder(folder: Path) -> Iterator[Path]:
    """The folder of packed files, private to this user, while no other process writes to it. Raises ConfigError if it
    cannot be used."""
    import fcntl

    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{folder}, for packed weights, is open to other users", "chmod it to 700, or set KVASIR_PACKED"
            )
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unusable(error) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)


def unusable(error: OSError) -> ConfigError:
    """The error for a folder of packed files that cannot be read or written."""
    where = f"{error.filename}: " if error.filename else ""
    return ConfigError(
        f"packed weights cannot be kept: {where}{error.strerror or error}", "set KVASIR_PACKED to another folder"
    )


def prune(folder: Path, model: str, key: str) -> None:
    """Removes files of the same model, whose keys all begin with `model`, but for the set of `key` and the last before.
    Other processes of its set may do the same."""
    used: dict[str, float] = {}
    with contextlib.suppress(OSError):
        os.utime(folder / f"{key}.weights")
        found = list(folder.glob(f"{model}*.weights"))
        for path in found:
            name = set_of(path.stem)
            used[name] = max(used.get(name, 0.0), path.stat().st_mtime)
        kept = sorted(used, key=lambda name: used[name], reverse=True)[:KEPT]
        for path in found:
            if set_of(path.stem) not in kept:
                path.with_suffix(".json").unlink(missing_ok=True)
                path.unlink(missing_ok=True)


def check_disk(folder: Path, nbytes: int) -> None:
    """Raises ConfigError if a file of so many bytes would fill the disk."""
    if (free := shutil.disk_usage(folder).free) < nbytes + _SPARE:
        raise ConfigError(
            f"packed weights take {nbytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free in {folder}",
            "free some, or set KVASIR_PACKED to a folder on another disk",
        )
