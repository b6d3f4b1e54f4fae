"""Places the values of calls in one range of device memory, each from its first to its last use.

A value of float32 rows may be stored in the dtype of the matrices' inputs if only matrix products read it: they would
round it to that dtype anyway. The parts of a split product take so many times the room of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.graph.fold import Call
from kvasir.ops.graph import Traced
from kvasir.ops.linear.triton_matrix import launch_parts
from kvasir.program.lower import Arena

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
PRODUCTS = ("qkv", "gated", "product", "linear", "experts")  # their first value is the input of a matrix


@dataclass(frozen=True, slots=True)
class Seat:
    """The memory of a value. offset: bytes. dtype: of its elements. parts: 0, or the number of parts of a product whose
    sum is still to be joined. ranks: of these, the number that ranks have gathered of each other."""

    offset: int
    dtype: str
    parts: int = 0
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """seats: by the `id()` of a value's base. size: bytes of the whole range."""

    seats: Mapping[int, Seat]
    size: int


def lay_out(
    calls: Sequence[Call], results: Sequence[Traced], rows: Mapping[str, int], dtype: str, given: Sequence[Traced] = ()
) -> Layout:
    """rows: the most rows of each domain. dtype: of the inputs of matrices. given: float32 values that are written
    before the calls."""
    return _Layout(calls, results, rows, dtype).run(given)


def weights_of(call: Call) -> Sequence[Any]:
    """The matrices of a call whose input is its first value."""
    takes = call.takes
    if call.kind == "experts":
        return [*takes["gate"], *takes["up"]]
    return takes.get("weights") or [takes[name] for name in ("weight", "gate", "up") if name in takes]


class _Layout:
    def __init__(self, calls: Sequence[Call], results: Sequence[Traced], rows: Mapping[str, int], dtype: str):
        self.calls, self.rows, self.dtype = calls, rows, dtype
        self.arena = Arena()
        self.seats: dict[int, Seat] = {}
        self.last = {id(v.base): i for i, call in enumerate(calls) for v in (*call.reads, *call.writes)}
        self.last |= {id(value.base): len(calls) for value in results}
        self.results = {id(value.base) for value in results}
        self.sent = {id(call.reads[0].base): call.takes["width"] for call in calls if call.kind == "all_gather"}
        self.rounded = self._rounded()

    def run(self, given: Sequence[Traced]) -> Layout:
        for value in given:
            size = self.rows[value.domain] * value.width * BYTES["float32"]
            self.seats[id(value.base)] = Seat(self.arena.take(size), "float32")
        for at, call in enumerate(self.calls):
            for out in call.writes:
                self._seat(at, call, out)
            for value in {id(v.base): v for v in (*call.reads, *call.writes)}.values():
                base = id(value.base)
                if self.last[base] == at and base in self.seats:
                    self._release(base)
        return Layout(self.seats, self.arena.size)

    def _rounded(self) -> set[int]:
        """The values that are stored in the dtype of the matrices' inputs."""
        readers: dict[int, list[bool]] = {}
        for call in self.calls:
            for place, value in enumerate(call.reads):
                is_input = not place and call.kind in PRODUCTS and all(w.dtype == self.dtype for w in weights_of(call))
                # Attention multiplies queries by what the cache holds.
                ok = is_input or call.kind in ("attention", "choose")
                readers.setdefault(id(value.base), []).append(ok)
        makers = {id(out.base): call.kind for call in self.calls for out in call.writes}
        able = {"join", "norm", "gated", "attention", "place_qkv", "choose", "join_heads", "grouped_norm"}
        return {
            base
            for base, uses in readers.items()
            if all(uses) and base not in self.results and makers.get(base) in able and self.dtype != "float32"
        }

    def _seat(self, at: int, call: Call, out: Traced) -> None:
        base = id(out.base)
        if call.kind == "join" and out is call.writes[0] and (there := self._reused(at, call.reads[1])):
            self.seats[base] = there
            return
        parts, ranks = self._parts(call), 1
        if call.kind == "gather":
            ranks = call.takes["parts"]
            parts = ranks * self.seats[id(call.reads[0].base)].parts
        dtype = self.dtype if base in self.rounded else "float32"
        width = max(out.width, self.sent.get(base, 0))
        size = max(parts, 1) * self.rows[out.domain] * width * BYTES[dtype]
        self.seats[base] = Seat(self.arena.take(size), dtype, parts, ranks)

    @staticmethod
    def _parts(call: Call) -> int:
        """Of a product whose sum another call joins."""
        if call.kind not in ("qkv", "product"):
            return 0
        weights = weights_of(call)
        return launch_parts(sum(weight.rows for weight in weights), weights[0].segments)

    def _reused(self, at: int, residual: Traced) -> Seat | None:
        """The seat of a residual that is read for the last time: the sum takes its place."""
        base = id(residual.base)
        return self.seats[base] if self.last[base] == at else None

    def _release(self, base: int) -> None:
        seat = self.seats[base]
        shared = any(s is seat and self.last[other] > self.last[base] for other, s in self.seats.items())
        if not shared:
            self.arena.give_back(seat.offset)
            self.arena.barrier()
