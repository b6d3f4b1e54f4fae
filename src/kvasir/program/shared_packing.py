"""Packing an adapter for ranks, each its own part. The norms of a matrix's rows are of all columns, of which ranks have
parts."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from kvasir.layers.adapters import ModelChanges
from kvasir.parallel.channel import Channel
from kvasir.plan import Bytes
from kvasir.program import adapter_messages as messages
from kvasir.program.adapter_messages import Changes, Squares


class Adapters(Protocol):
    """Of the programs of a process: adapters.Adapters, staged.StagedAdapters."""

    def part_of(self, name: str) -> tuple[int, int] | None: ...
    def check(self, adapter: ModelChanges) -> None: ...
    def squares(self, adapter: ModelChanges) -> dict[str, np.ndarray]: ...
    def pack(self, adapter: ModelChanges, squares: Mapping[str, np.ndarray]) -> Any: ...


def shared_squares(adapters: Adapters, own: Mapping[str, np.ndarray]) -> dict[str, Squares]:
    """Those of a rank's squares of which it has only a part."""
    parts = {name: adapters.part_of(name) for name in own}
    return {name: Squares(*part, own[name]) for name, part in parts.items() if part}


def whole_squares(everyones: Iterable[Mapping[str, Squares]]) -> dict[str, np.ndarray]:
    """The squares of whole rows, float64 [rows, segments], or of whole columns of tables. Several ranks may have the
    same part."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for squares in everyones:
        for name, part in squares.items():
            found.setdefault(name, {})[part.first] = part.sums
    return {name: np.concatenate([parts[at] for at in sorted(parts)], 1) for name, parts in found.items()}


@dataclass(frozen=True, eq=False)
class SharedAdapter:
    """A packed adapter: rank 0's part, and the key of the others'. own: as the process's program packs it. rank: the
    greatest. nbytes: of all parts."""

    own: Any
    key: int
    rank: int
    nbytes: int


class SharedPacking:
    """Packs adapters on rank 0. ask(message): sends it to the other ranks and returns a function that waits for their
    answers."""

    def __init__(self, adapters: Adapters, ask: Callable[[Bytes], Callable[[], Sequence[Bytes]]]):
        self._adapters, self._ask = adapters, ask
        self._lock, self._keys = threading.Lock(), itertools.count()
        self._dropped: list[int] = []

    def pack(self, adapter: ModelChanges) -> SharedAdapter:
        """See Program.pack_adapter."""
        self._adapters.check(adapter)
        with self._lock:
            key = next(self._keys)
            try:
                packed = self._pack(adapter, key)
            except BaseException:
                self._dropped.append(key)
                raise
        weakref.finalize(packed, self._dropped.append, key)
        return packed

    def _pack(self, adapter: ModelChanges, key: int) -> SharedAdapter:
        waiting = self._ask(messages.encode(messages.Offer(key, Changes.of(adapter))))
        squares = self._adapters.squares(adapter)
        theirs = [answer.squares for answer in _answers(waiting) if isinstance(answer, messages.Offered)]
        whole = whole_squares([shared_squares(self._adapters, squares), *theirs])
        waiting = self._ask(messages.encode(messages.Pack(key, whole)))
        try:
            own = self._adapters.pack(adapter, {**squares, **whole})
        finally:
            answers = waiting()
        parts = [own, *(one for one in map(_answer, answers) if isinstance(one, messages.Packed))]
        return SharedAdapter(own, key, max(part.rank for part in parts), sum(part.nbytes for part in parts))

    def dropped(self) -> list[int]:
        """Keys of adapters that no longer exist, each once."""
        found: list[int] = []
        while self._dropped:
            found.append(self._dropped.pop())
        return found


def _answers(waiting: Callable[[], Sequence[Bytes]]) -> list[messages.Offered | messages.Packed]:
    return [_answer(answer) for answer in waiting()]


def _answer(answer: Bytes) -> messages.Offered | messages.Packed:
    found = messages.decode_answer(answer)
    if isinstance(found, messages.Refused):
        raise ValueError(found.reason)
    return found


class FollowingPacking:
    """Packs this rank's parts, on a thread of its own, as rank 0 asks on the channel."""

    def __init__(self, adapters: Adapters, channel: Channel):
        self._adapters, self._channel = adapters, channel
        self._offered: dict[int, tuple[Changes, dict[str, np.ndarray]]] = {}
        self._packed: dict[int, Any] = {}
        threading.Thread(target=self._serve, daemon=True, name="kvasir-rank-packing").start()

    def take(self, key: int, rank: int) -> Any:
        """A packed adapter. rank: the greatest of all parts: ranks exchange products of equal widths."""
        return replace(self._packed[key], rank=rank)

    def drop(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._packed.pop(key, None)

    def _serve(self) -> None:
        while True:
            try:
                message = messages.decode(self._channel.receive())
            except (EOFError, OSError):
                return
            try:
                answer = self._answer(message)
            except (ValueError, MemoryError) as error:
                answer = messages.Refused(str(error) or type(error).__name__)
            self._channel.send(messages.encode(answer))

    def _answer(self, message: messages.Offer | messages.Pack) -> messages.Offered | messages.Packed:
        if isinstance(message, messages.Offer):
            self._offered.clear()  # of an adapter that another rank refused
            self._adapters.check(message.changes)
            squares = self._adapters.squares(message.changes)
            self._offered[message.key] = message.changes, squares
            return messages.Offered(shared_squares(self._adapters, squares))
        changes, squares = self._offered.pop(message.key)
        packed = self._adapters.pack(changes, {**squares, **message.squares})
        self._packed[message.key] = packed
        return messages.Packed(packed.rank, packed.nbytes)
