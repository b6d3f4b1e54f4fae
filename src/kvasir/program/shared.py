"""Ranks and stages that are processes of one machine: they meet in shared memory (csrc/ranks.h)."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p

import numpy as np

from kvasir.errors import ConfigError
from kvasir.ops import native
from kvasir.parallel import MAX_RANKS, Cut, Mesh

SUM, COLUMNS, PICK, EXPERTS = range(4)  # MeetingKind
PAUSES = 100  # spins of a rank that waits, a few microseconds, if every rank has processors of its own
PERIODS = 10  # of a native wait in a second


class MeetingStruct(ctypes.Structure):
    """The operands of a meeting (csrc/ranks.h)."""

    _fields_ = (
        ("ranks", c_void_p),
        ("kind", c_int32),
        ("parts", c_int32),
        ("shares", c_int32),
        ("lead_only", c_int32),
        ("width", c_int64),
        ("borders", c_int64 * (MAX_RANKS + 1)),
    )


def segment_bytes(size: int, stages: int = 1) -> int:
    """Bytes of the segment in which `size` ranks of each of `stages` meet."""
    return native.declare("kvasir_ranks_bytes", c_int64, c_int32, c_int32)(size, stages)


def memory_file(name: str, size: int = 0) -> int:
    """A file without a name in the file system, of zeros, which ends with the last process that has it open. Raises
    ConfigError if the system has none."""
    try:
        fd = os.memfd_create(f"kvasir-{name}", os.MFD_CLOEXEC)
    except (AttributeError, OSError) as error:
        raise ConfigError(f"ranks need shared memory: {error}", "allow memfd_create, or use one rank") from error
    os.ftruncate(fd, size)
    return fd


def end_with_parent() -> None:
    """Lets the system kill this process when the thread that started it ends."""
    native.declare("kvasir_end_with_parent", c_int32)()


class SharedRank(Mesh):
    """One of `size` processes that share each matrix of a stage. fd: the segment, `segment_bytes` of zeros at first.
    spins: whether a processor is free for each thread of all ranks. seconds: the longest wait for another process;
    then, as after `abort`, none waits any more, and the results of meetings are meaningless. stage, stages: its stage,
    and how many there are. The processes of all stages are numbered from the last stage to the first."""

    def __init__(
        self, fd: int, rank: int, size: int, spins: bool = False, seconds: float = 0.0, stage: int = 0, stages: int = 1
    ):  # fmt: skip
        self.rank, self.size, self.stage, self.stages = rank, size, stage, stages
        self._memory = mmap.mmap(fd, segment_bytes(size, stages))
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._close = native.declare("kvasir_ranks_close", None, c_void_p)
        self._abort = native.declare("kvasir_ranks_abort", None, c_void_p)
        self._aborted = native.declare("kvasir_ranks_aborted", c_int32, c_void_p)
        self._give = native.declare("kvasir_ranks_give", None, c_void_p, c_int32)
        self._settle = native.declare("kvasir_ranks_settle", c_int32, c_void_p)
        self._next = native.declare("kvasir_ranks_next", c_int32, c_void_p)
        self._done = native.declare("kvasir_ranks_done", None, c_void_p)
        self._receive = native.declare("kvasir_ranks_receive", c_int32, c_void_p)
        self._send = native.declare("kvasir_ranks_send", None, c_void_p)
        self._exchange = native.declare("kvasir_ranks_exchange", c_int32, c_void_p, c_void_p, c_void_p, c_int64)
        self._progress = native.declare("kvasir_ranks_progress", c_int64, c_void_p, c_int32)
        self._behind = native.declare("kvasir_ranks_behind", c_int32, c_void_p, c_int32)
        made = native.declare("kvasir_ranks_open", c_void_p, c_void_p, *[c_int32] * 6)
        pauses, periods = PAUSES if spins else 0, round(PERIODS * seconds)
        self._address: int = made(start, rank, size, stage, stages, pauses, periods)
        assert self._address, f"rank {rank} of {size}, stage {stage} of {stages}"

    def __del__(self) -> None:
        if getattr(self, "_address", None):
            self._close(self._address)

    @property
    def number(self) -> int:
        """Of this process, 0 for the one that leads."""
        return (self.stages - 1 - self.stage) * self.size + self.rank

    # -- meetings

    def meeting(
        self, kind: int, width: int, parts: int, borders: Cut | None = None, shares: int = 1, lead_only: bool = False
    ) -> MeetingStruct:
        """The operands of a collective that a step performs. lead_only: whether only rank 0 needs the result."""
        found = MeetingStruct(self._address, kind, parts, shares, lead_only, width)
        for i, border in enumerate(borders.borders if borders else ()):
            found.borders[i] = border
        return found

    def meet(self, mine: np.ndarray) -> Sequence[np.ndarray]:
        sizes = self._bytes_of_all(np.array([mine.nbytes], np.int64)).view(np.int64)[:, 0]
        padded = np.zeros(-(-int(sizes.max()) // 4) * 4, np.uint8)
        padded[: mine.nbytes] = np.ascontiguousarray(mine).reshape(-1).view(np.uint8)
        shape = (-1, *mine.shape[1:])  # the first axis may differ
        everyones = zip(self._bytes_of_all(padded), sizes, strict=True)
        if (sizes == mine.nbytes).all():
            return [raw[:size].view(mine.dtype).reshape(mine.shape) for raw, size in everyones]
        return [raw[:size].view(mine.dtype).reshape(shape) for raw, size in everyones]

    def _bytes_of_all(self, mine: np.ndarray) -> np.ndarray:
        found = np.empty((self.size, mine.nbytes), np.uint8)
        if self._exchange(self._address, found.ctypes.data, mine.ctypes.data, mine.nbytes):
            raise ConnectionError("a rank is gone")
        return found

    def abort(self) -> None:
        """Ends all waits of all processes. Any thread may call it."""
        self._abort(self._address)

    @property
    def aborted(self) -> bool:
        return bool(self._aborted(self._address))

    def progress(self, number: int) -> int:
        """A number that changes with each meeting of a process, and with each part of a step that its stage leaves."""
        return self._progress(self._address, number)

    def behind(self, number: int) -> bool:
        """Whether the others may be waiting for a process."""
        return bool(self._behind(self._address, number))

    # -- parts of steps, from stage to stage

    def receive(self) -> bool:
        """Waits until the stage before this one has left the next part. False if the processes are aborted."""
        return self._receive(self._address) == 0

    def send(self) -> None:
        """Says that this stage has left a part for the next, or has computed it if it is the last."""
        if self.rank == 0:
            self._send(self._address)

    # -- commands of process 0 to the others

    def give(self, parts: int = 0) -> None:
        """Process 0: gives the others the command that it has left where they read it. parts: of a step in stages."""
        self._give(self._address, parts)

    def settle(self) -> bool:
        """Process 0: waits until the others have carried out all commands. False if they are aborted."""
        return self._settle(self._address) == 0

    def next(self) -> bool:
        """Another process: waits for a command. False if they are aborted."""
        return self._next(self._address) == 0

    def done(self) -> None:
        """Another process: the last command is carried out."""
        self._done(self._address)
