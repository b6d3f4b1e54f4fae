"""DiskTier: parts of blocks as files in one folder of bounded size, found again after a restart.

    folder/ab/ab12…ef.0       the key, different for each model, in hex; the group: a complete record
    folder/tmp-…              being written, under a lock that ends with its writer's process

A file is written under a temporary name, then renamed: a writer that dies leaves a complete file or none. Parts that
are computed faster than they are read are not written, and the time for writing is limited to a share of the computing
time plus the time that reading has saved. So a folder without hits costs little. Both rates are measured: if nothing
has been read for a while, one of the parts just written is read back.

The writer is limited by this share and not by a low thread priority: a thread that holds the interpreter lock while it
waits for a processor blocks the engine.

Several engines may share the folder. No engine trusts the files of another one, or of its own previous run: each record
is compared with the request and its checksum verified on reading, and a file that has vanished is a miss.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from kvasir.kv.tiers import record
from kvasir.kv.tiers.block import KEY_BYTES, Name, StoredBlock, StoreFacts
from kvasir.kv.tiers.connector import Bytes, Failed
from kvasir.kv.tiers.folder import make_private
from kvasir.kv.tiers.record import Unusable
from kvasir.kv.tiers.transfers import Loads, TransferMeter, TransferWorker
from kvasir.kv.tiers.write_budget import WriteBudget
from kvasir.memory import QUEUE_BYTES
from kvasir.statistics import TierStats

Save = tuple[StoredBlock, int, memoryview, float]  # with the seconds taken from the write budget

SCAN_SECONDS = 60.0  # interval of listing the folder, to find the changes of other engines
SCAN_SHARE = 16  # also listed after writing 1/16 of the bound, so that all engines together keep it
TRY_SECONDS = 5.0  # lifetime of a rate measured by one trial read
PAUSE_SECONDS = 5.0  # no writes for this long after one failed, so that a full disk is not retried for each block
FILE_NAME = re.compile(r"([0-9a-f]{64})\.([0-9]|[1-9][0-9])")
TEMPORARY = "tmp-"


class Index:
    """The known content of the folder: name -> bytes, least recently used first. Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self._sizes: OrderedDict[Name, int] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: Name) -> bool:
        return name in self._sizes

    def put(self, name: Name, size: int) -> None:
        """Adds a file of `size` bytes as the most recently used."""
        with self._lock:
            self.num_bytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size

    def touch(self, name: Name) -> None:
        """Marks a file as the most recently used; no error if it is unknown."""
        with self._lock, suppress(KeyError):
            self._sizes.move_to_end(name)

    def remove(self, name: Name) -> None:
        """Removes a file; no error if it is unknown."""
        with self._lock:
            self.num_bytes -= self._sizes.pop(name, 0)

    def pop_oldest(self) -> Name:
        """Removes and returns the least recently used file."""
        with self._lock:
            name, size = self._sizes.popitem(last=False)
            self.num_bytes -= size
            return name

    def replace(self, files: Sequence[tuple[Name, int]]) -> None:
        """Replaces the content by (name, bytes) pairs, least recently used first."""
        with self._lock:
            self._sizes = OrderedDict(files)
            self.num_bytes = sum(self._sizes.values())


class DiskTier:
    """A KVConnector over `folder`, created with mode 0700 if missing. Raises ConfigError if the folder is a link or
    open to other users. Later disk errors are never raised, only counted.

    max_bytes: bound on all files. queue_bytes: bound on parts waiting to be written; further parts are dropped.
    load_bytes: bound on parts being read, or read and not yet fetched. share: the fraction of the computing time that
    may be spent on writing; None: unlimited.
    """

    name = "disk"

    def __init__(
        self,
        folder: Path,
        facts: StoreFacts,
        max_bytes: int,
        *,
        queue_bytes: int = QUEUE_BYTES,
        load_bytes: int = QUEUE_BYTES,
        share: float | None = None,
    ):
        make_private(folder)
        self.facts = facts
        self._folder = folder
        self._max_bytes = max_bytes
        self._index = Index()
        self._meter = TransferMeter()
        self._write_budget = WriteBudget(share)
        self._pace = 0.0  # the last known pace, bytes per second
        self._ending = False
        self._queued: set[Name] = set()
        self._unscanned = 0  # bytes written since the last listing
        self._resume_at = 0.0  # time.monotonic() at which writing resumes
        self._scanned = threading.Event()
        self._loads = Loads("kv-disk-load", self._read, load_bytes, self._meter)
        self._saver: TransferWorker[Save] = TransferWorker("kv-disk-save", self._save, queue_bytes, SCAN_SECONDS)

    # -- the protocol --------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes], group: int = 0) -> int:
        """The number of leading `keys` with a file in the index."""
        for i, key in enumerate(keys):
            if self._name(key, group) not in self._index:
                return i
        return len(keys)

    def _name(self, key: bytes, group: int) -> Name:
        """The file of a part."""
        return file_key(key, self.facts.model), group

    def ask(self, keys: Sequence[bytes], group: int = 0, timeout: float = 0.0) -> bool:
        """Always True: the index is local."""
        return True

    def read_seconds(self, names: Sequence[Name]) -> float:
        """Estimated from the measured read rate and the bytes of open loads; see KVConnector.read_seconds."""
        return self._meter.read_seconds(self._loads.num_bytes + sum(self.facts.groups[g].num_bytes for _, g in names))

    def wants(self, key: bytes, group: int, pace: float = 0.0, depth: int = 0) -> bool:
        """False if the part is known, if computing it is faster than reading it, or if the write budget is used up;
        see KVConnector.wants."""
        if self._known(self._name(key, group)):
            return False
        if pace > 0:
            self._pace = pace
            self._write_budget.computed(self.facts.groups[group].num_bytes / pace)
        if 0 < self._meter.read_rate() < pace:
            self._meter.save("slow")
            return False
        if not (self._ending or self._write_budget.affords(depth)):
            self._meter.save("dear")
            return False
        return True

    def _known(self, name: Name) -> bool:
        return name in self._index or name in self._queued

    def start_load(self, block: StoredBlock, group: int = 0) -> int:
        """Queues a read; see KVConnector.start_load."""
        return self._loads.start(block, group, self.facts.groups[group].num_bytes)

    def poll(self, ticket: int, timeout: float = 0.0) -> memoryview | Failed | None:
        """See KVConnector.poll."""
        return self._loads.poll(ticket, timeout)

    def cancel(self, ticket: int) -> None:
        """See KVConnector.cancel."""
        self._loads.cancel(ticket)

    def save(self, block: StoredBlock, group: int, payload: Bytes) -> bool:
        """Queues a write. False if the part is known, larger than the bound, writing is paused after an error, or the
        queue is full."""
        payload = memoryview(payload).cast("B")
        assert self.facts.admits(block, group), "the block belongs to another store"
        assert payload.nbytes == self.facts.groups[group].num_bytes, "a part must have the size that its group declares"
        name = self._name(block.key, group)
        if refusal := self._refusal(name, payload.nbytes):
            self._meter.save(refusal)
            return False
        self._queued.add(name)
        taken = self._write_budget.take(payload.nbytes)
        if self._saver.put((block, group, payload, taken), payload.nbytes):
            return True
        self._write_budget.spend(taken, 0, 0.0)
        self._queued.discard(name)
        self._meter.save("full")
        return False

    def _refusal(self, name: Name, num_bytes: int) -> str:
        if self._known(name):
            return "known"
        if num_bytes + record.PREFIX.size + record.MAX_HEADER > self._max_bytes:
            return "large"
        return "paused" if time.monotonic() < self._resume_at else ""

    def ending(self) -> None:
        """Lifts the write budget for the saves that follow."""
        self._ending = True

    def stats(self) -> TierStats:
        """See KVConnector.stats."""
        return self._meter.stats(
            len(self._loads),
            self._loads.num_bytes,
            queued_bytes=self._saver.cost,
            num_parts=len(self._index),
            num_bytes=self._index.num_bytes,
        )

    def each(self) -> dict[str, TierStats]:
        """See KVConnector.each."""
        return {self.name: self.stats()}

    def close(self, timeout: float = 5.0) -> None:
        """Fails open loads and writes queued parts until the timeout (seconds)."""
        self._loads.close()
        for _ in self._saver.close(timeout):
            self._meter.save("closed")

    def wait_scanned(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds for the first listing of the folder, which finds the files of previous runs.
        Returns whether it is done."""
        return self._scanned.wait(timeout)

    # -- reading: the thread of the loads --------------------------------------------------------------------

    def _path(self, name: Name) -> Path:
        key = name[0].hex()
        return self._folder / key[:2] / f"{key}.{name[1]}"

    def _read(self, block: StoredBlock, group: int) -> memoryview:
        """Reads and verifies a part. Removes a file of its name that does not hold it. Raises Unusable."""
        name, begin = self._name(block.key, group), time.perf_counter()
        try:
            payload = self._open_and_read(block, group)
        except FileNotFoundError:
            self._index.remove(name)
            raise Unusable("missing") from None
        except OSError:
            self._index.remove(name)
            raise Unusable("io") from None
        except Unusable:
            self._remove(name)
            raise
        self._index.touch(name)
        if self._pace > 0:
            self._write_budget.saved(payload.nbytes / self._pace - (time.perf_counter() - begin))
        return payload

    def _open_and_read(self, block: StoredBlock, group: int) -> memoryview:
        # O_NONBLOCK: opening a named pipe would wait for its writer.
        with _opened(self._path(self._name(block.key, group)), os.O_RDONLY | os.O_NONBLOCK) as fd:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise Unusable("corrupt")
            payload = record.unseal(self.facts, block, group, info.st_size, lambda buffer: _fill(fd, buffer))
            with suppress(OSError):  # a read-only folder still serves
                os.utime(fd)  # keeps the order of use for later runs and other engines
            return payload

    def _remove(self, name: Name) -> None:
        self._index.remove(name)
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    # -- writing: the thread of the saves --------------------------------------------------------------------

    def _save(self, job: Save | None) -> None:
        if job is None or self._unscanned * SCAN_SHARE > self._max_bytes:
            self._scan()
        if job is None:
            return
        block, group, payload, taken = job
        name, begin, written = self._name(block.key, group), time.perf_counter(), 0
        try:
            if time.monotonic() < self._resume_at:
                self._meter.save("paused")
            else:
                self._write(name, record.seal(self.facts, block, group, payload), payload)
                written = payload.nbytes
        except OSError:
            self._resume_at = time.monotonic() + PAUSE_SECONDS
            self._meter.save("error")
        finally:
            self._queued.discard(name)
            self._write_budget.spend(taken, written, time.perf_counter() - begin)
        if written and not self._meter.read_rate():
            self._try_reading(block, group)

    def _try_reading(self, block: StoredBlock, group: int) -> None:
        """Measures reading a part back, most likely from the page cache; loads measure the disk itself later."""
        with suppress(OSError, Unusable):
            begin = time.perf_counter()
            payload = self._open_and_read(block, group)
            self._meter.read(payload.nbytes, time.perf_counter() - begin, TRY_SECONDS)

    def _write(self, name: Name, head: bytes, payload: memoryview) -> None:
        size = len(head) + payload.nbytes
        self._make_room(size)
        path = self._path(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _temporary(self._folder) as (fd, temporary):
            _drain(fd, memoryview(head))
            _drain(fd, payload)
            # No fsync: a process that dies leaves complete files, and a file torn by a power cut fails its checksum.
            os.rename(temporary, path)
        self._index.put(name, size)
        self._unscanned += size
        self._meter.save("saved", payload.nbytes)

    def _make_room(self, size: int) -> None:
        while len(self._index) and self._index.num_bytes + size > self._max_bytes:
            self._remove(self._index.pop_oldest())
            self._meter.evict()

    def _scan(self) -> None:
        """Rebuilds the index from file names, sizes and modification times; contents are checked on reading."""
        self._unscanned = 0
        try:
            files = sorted(self._files())
            self._index.replace([(name, size) for _, name, size in files])
            self._make_room(0)
        except OSError:
            self._meter.save("error")
        self._scanned.set()

    def _files(self) -> Iterator[tuple[int, Name, int]]:
        for entry in _listed(self._folder):
            if entry.name.startswith(TEMPORARY):
                _remove_abandoned(entry.path)
            elif len(entry.name) == 2 and entry.is_dir(follow_symlinks=False):
                yield from _parts(entry)


def file_key(key: bytes, model: str) -> bytes:
    """The key of a file: that of the block, which is the same for all models, made different for each."""
    return (int.from_bytes(key) ^ int.from_bytes(sha256(model.encode()).digest())).to_bytes(KEY_BYTES)


def _parts(folder: os.DirEntry) -> Iterator[tuple[int, Name, int]]:
    for entry in _listed(folder.path):
        match = FILE_NAME.fullmatch(entry.name)
        if not match or not entry.name.startswith(folder.name):
            continue
        with suppress(FileNotFoundError):  # another engine removed it meanwhile
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(info.st_mode):
                yield info.st_mtime_ns, (bytes.fromhex(match[1]), int(match[2])), info.st_size


def _listed(folder: Path | str) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return list(entries)


@contextmanager
def _temporary(folder: Path) -> Iterator[tuple[int, Path]]:
    """A new file locked by its writer, removed if the `with` block raises."""
    while True:
        path = folder / (TEMPORARY + secrets.token_hex(8))
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink == 0:
                continue  # before it was locked, another engine removed it as abandoned
            try:
                yield fd, path
            except BaseException:
                path.unlink(missing_ok=True)
                raise
            return


def _remove_abandoned(path: str) -> None:
    """Removes a temporary file unless its writer is alive and holds the lock."""
    with suppress(OSError), _opened(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)


@contextmanager
def _opened(path: Path | str, flags: int) -> Iterator[int]:
    """A file descriptor of `path`, without following a symbolic link; new files have mode 0600."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _fill(fd: int, buffer: memoryview) -> None:
    """Fills `buffer` from the file. Raises Unusable if the file ends early."""
    while buffer:
        n = os.readv(fd, [buffer])
        if n == 0:
            raise Unusable("truncated")
        buffer = buffer[n:]


def _drain(fd: int, buffer: memoryview) -> None:
    while buffer:
        buffer = buffer[os.write(fd, buffer) :]
