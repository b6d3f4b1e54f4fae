"""Packs weights for the native kernels, straight from the mapped checkpoint, tensor by tensor.

A matrix keeps the format of its file; a float matrix follows the dtype as on the eager executor, and `quantize` changes
float matrices.

    stored          dtype bfloat16               dtype float32
    F32             rounded to BF16              F32, rows in float32
    BF16            BF16, rows in bfloat16       BF16, rows in float32
    F16             F16, rows in float32         F16, rows in float32
    quantized       as it is, rows in int8       as it is, rows in int8
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from kvasir.errors import ConfigError, UnsupportedModel
from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import Down, GateUp, Head, Linear
from kvasir.layers.module import Shard
from kvasir.layers.places import HostPlace
from kvasir.ops.linear.packed import PackedMatrix, num_segments, pack_rows, packed_bytes, take_columns
from kvasir.quant.inputs import Inputs
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import WeightSource

FLOATS = ("F32", "F16", "BF16")
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
GROUP = 32  # values of a row that share a scale
# Formats that `quantize` gives to the linear layers, and to the embedding table and the head.
QUANTIZE = {"q8": ("Q8_0", "Q8_0"), "q4": ("Q4_0", "Q8_0")}


# (the tensor's name, the packed matrix, the original values as float32 [rows, columns])
Report = Callable[[str, PackedMatrix, np.ndarray], None]


class Layers(Protocol):
    """Keeps the matrices of layers elsewhere (runner.streaming.PackedLayers)."""

    def find(self, leaf: Any, name: str, shape: tuple[int, int], inputs: Inputs | None) -> PackedMatrix | None: ...
    def keep(self, leaf: Any, name: str, matrix: PackedMatrix) -> None: ...


@dataclass(slots=True)
class Packer:
    """Packs matrices for a model that runs as a program. quantize: "" or a name of QUANTIZE.

    formats: bytes by format. notes: messages for the user. report: called with each matrix that is quantized.
    layers: where those of layers go if the model is larger than memory.
    leave_out: says whether another process has a tensor, and then gives its module one without memory.
    whole: tables that are whole in memory, by the `id()` of the module that holds their first rows.
    changed, kept: with `quantize`, the number of matrices it changed, and the names of the others by reason.
    """

    dtype: str
    quantize: str = ""
    threads: int = 1
    report: Report | None = None
    layers: Layers | None = None
    formats: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changed: int = 0
    kept: dict[str, list[str]] = field(default_factory=dict)
    leave_out: Callable[[Any, str], bool] | None = None
    whole: Mapping[int, PackedMatrix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quantize and self.quantize not in QUANTIZE:
            raise ConfigError(f"quantize is {self.quantize!r}", f"choose one of {', '.join(QUANTIZE)}")

    def __call__(self, leaf: Any, name: str, source: WeightSource, stored: str, take: Any) -> bool:
        """Packs a matrix and gives it to its layer; False for any other tensor (kvasir.weights.load.Hold)."""
        if self.leave_out and self.leave_out(leaf, name):
            return True
        if not _is_matrix(leaf, name):
            return False
        shard = _shard(leaf, name)
        if not all(shard.shape):
            return True  # all of it is on other ranks
        whole = self.whole.get(id(leaf))
        if whole is not None and whole.inputs is None:
            leaf.hold(name, whole.first(shard.rows[1]))
            return True
        cols = leaf.expects()[name][1]
        inputs, decodes = self._inputs(leaf, source.info(stored), take, shard, cols)
        self._note_decoded(source.info(stored).dtype, take)
        packed = self.layers.find(leaf, name, shard.shape, inputs) if self.layers else None
        kind = stored_kind(source.info(stored).dtype, take)
        if packed is None:
            kind, rows = _decoded_rows(source, stored, take) if decodes else _raw_rows(source, stored, take)
            packed = self._pack(leaf, stored, kind, rows[slice(*shard.rows)], cols, shard, inputs)
            if self.layers:
                self.layers.keep(leaf, name, packed)
        if self.quantize:
            self._count(stored, self._why_kept(leaf, "F32" if kind == "F64" else kind, cols))
        leaf.hold(name, packed)
        source.drop(stored)
        self.formats[packed.format] = self.formats.get(packed.format, 0) + packed.nbytes
        if packed.note and packed.note not in self.notes:
            self.notes.append(packed.note)
        return True

    def _inputs(self, leaf: Any, info: TensorInfo, take: Any, shard: Shard, cols: int) -> tuple[Inputs | None, bool]:
        """What the checkpoint says about the input rows of a matrix, if the kernels can follow it, and whether
        the matrix must be decoded, since they cannot."""
        if info.inputs is None:
            return None, False
        is_whole, is_turned = shard.columns == (0, cols), take is not None and take.turned
        if info.inputs.order is not None and not (is_whole and getattr(leaf, "own_inputs", False) and not is_turned):
            return None, not is_turned
        if info.inputs.rounding and (is_turned or not self._follows(leaf, info, is_whole)):
            return None, False
        return info.inputs, False

    def _follows(self, leaf: Any, info: TensorInfo, is_whole: bool) -> bool:
        """Whether rows are rounded by the checkpoint's scheme. Raises UnsupportedModel where ranks, which have parts of
        rows, would do it by other scales."""
        assert info.inputs is not None
        if not getattr(leaf, "own_inputs", False) and not (info.inputs.is_shared and isinstance(leaf, GateUp | Down)):
            note = f"activations of {info.dtype} are not quantized by the file's scheme where matrices share their rows"
            if note not in self.notes:
                self.notes.append(note)
            return False
        if not is_whole and info.inputs.needs_row:
            raise UnsupportedModel(
                f"{info.name}: its activations have a scale for each row, of which several ranks see parts",
                "run it on one rank",
            )
        return True

    def _note_decoded(self, kind: str, take: Any) -> None:
        note = f"matrices of {kind} that are used transposed are decoded"
        if stored_kind(kind, take) != kind and kind != "F64" and note not in self.notes:
            self.notes.append(note)

    @property
    def place(self) -> HostPlace:
        """Where everything but the matrices goes."""
        return HostPlace()

    def quantize_note(self) -> tuple[str, ...]:
        """A message for the user about the matrices that `quantize` did not change; empty if it changed all."""
        if not self.quantize or not self.kept:
            return ()
        total = self.changed + sum(map(len, self.kept.values()))
        did = f"changed {self.changed} of {total} matrices" if self.changed else f"changed nothing: {total} matrices"
        reasons = (f"{len(names)} {why} ({_some(names)})" for why, names in self.kept.items())
        return (f"quantize {self.quantize} {did}; unchanged: {'; '.join(reasons)}",)

    def _count(self, stored: str, reason: str) -> None:
        if reason:
            self.kept.setdefault(reason, []).append(stored)
        else:
            self.changed += 1

    def nbytes(self, leaf: Any, name: str, kind: str) -> int | None:
        """Bytes that a tensor of type `kind` takes when packed, None if it is not a matrix. Reads no weights."""
        if self.leave_out and self.leave_out(leaf, name):
            return 0
        if not _is_matrix(leaf, name):
            return None
        cols, shard = leaf.expects()[name][1], _shard(leaf, name)
        kind = "F32" if kind == "F64" else kind
        to, segments = self._plan(leaf, kind, cols)
        if not all(shard.shape):
            return 0
        return packed_bytes(kind, *shard.shape, segments // shard.parts, to)

    def segments(self, leaf: Any, kind: str) -> int:
        """Number of segments of a reducing linear's sum, for a tensor of type `kind`."""
        return self._plan(leaf, "F32" if kind == "F64" else kind, leaf.inputs)[1]

    def _pack(
        self, leaf: Any, stored: str, kind: str, rows: np.ndarray, cols: int, shard: Shard, inputs: Inputs | None
    ) -> PackedMatrix:
        """Packs a shard. rows: of the shard, with all columns. cols: of the whole matrix. The shard has its part of the
        whole matrix's segments."""
        to, segments = self._plan(leaf, kind, cols)
        in_float32 = _is_exact(leaf) or self.dtype == "float32"
        kind, rows, to = take_columns(kind, rows, cols, shard.columns, to)
        packed = pack_rows(
            kind, rows, *shard.shape, segments // shard.parts,
            to=to, activation="float32" if in_float32 else "auto", threads=self.threads, inputs=inputs,
        )  # fmt: skip
        if self.report and to != kind and to not in FLOATS:
            self.report(stored, packed, _floats(kind, rows))
        return packed

    def _plan(self, leaf: Any, kind: str, cols: int) -> tuple[str, int]:
        """(format, segments)"""
        to = self._format(leaf, kind, cols)
        return to, num_segments(cols, to) if getattr(leaf, "reduces", False) else 1

    def _format(self, leaf: Any, kind: str, cols: int) -> str:
        if _is_exact(leaf) or kind not in FLOATS:
            return kind
        if self.quantize and not self._why_kept(leaf, kind, cols):
            return QUANTIZE[self.quantize][isinstance(leaf, Embedding | Head)]
        return "BF16" if kind == "F32" and self.dtype == "bfloat16" else kind

    def _why_kept(self, leaf: Any, kind: str, cols: int) -> str:
        """Why `quantize` does not change a matrix; "" if it does."""
        if kind not in FLOATS:
            return f"stored as {kind} already"
        if _is_exact(leaf):
            return "kept exact"
        return f"with {cols} columns, not a multiple of {GROUP}" if cols % GROUP else ""


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _is_matrix(leaf: Any, name: str) -> bool:
    return isinstance(leaf, Linear | Embedding) and name.rpartition(".")[2] == "weight"


def _shard(leaf: Linear | Embedding, name: str) -> Shard:
    """The part of the matrix that this rank holds."""
    return leaf.shard(name)


def _is_exact(leaf: Any) -> bool:
    return getattr(leaf, "keeps_float32", False)


def stored_kind(kind: str, take: Any) -> str:
    """The type of the rows of a tensor stored as `kind`: if they are transposed, quantized types are decoded."""
    return "F32" if take is not None and take.turned and kind not in (*FLOATS, "F64") else kind


def _raw_rows(source: WeightSource, stored: str, take: Any) -> tuple[str, np.ndarray]:
    """The format and the rows' bytes, uint8 [rows, bytes per row]; a view of the file if no bytes have to move."""
    info = source.info(stored)
    kind = stored_kind(info.dtype, take)
    if kind in (*FLOATS, "F64"):
        array = source.array(stored)
        array = array.astype(np.float32) if kind == "F64" else array
        array = np.ascontiguousarray(take.of(array) if take else array)
        return "F32" if kind == "F64" else kind, array.view(np.uint8)
    raw = source.raw(stored)
    return kind, take.of_rows(raw) if take else raw


def _decoded_rows(source: WeightSource, stored: str, take: Any) -> tuple[str, np.ndarray]:
    """As `_raw_rows`, of the values of a matrix whose bytes the kernels cannot use."""
    array = source.array(stored)
    array = np.ascontiguousarray(take.of(array) if take else array)
    kind = next(name for name, dtype in _TYPES.items() if array.dtype == dtype)
    return kind, array.view(np.uint8)


def _floats(kind: str, rows: np.ndarray) -> np.ndarray:
    return rows.view(_TYPES[kind]).astype(np.float32)
