"""What an adapter is: first as its file says, then by the modules of a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.adapters import factors_of

MAX_RANK = 4096
MAX_EXPERTS = 4096
MAX_SCALE = 1e6
FLOATS = ("F32", "F16", "BF16", "F64")  # dtypes of an adapter's tensors


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """A low-rank change of one module as the file has it, or of one parameter of a module that holds stacked experts.

    module: its name in the checkpoint of the base model ("model.layers.0.self_attn.q_proj").
    parameter: of a module that holds several, such as "gate_up_proj" of experts; "" for the module's weight.
    a: [rank, inputs]; of experts [experts * rank, inputs]. b: [outputs, rank]; of experts [outputs, rank * experts],
    the expert's number varying fastest. stacked: whether a and b are [experts, rank, inputs] and [experts, outputs,
    rank] instead. embedding: whether it is a table's, with inputs tokens and outputs its width. tied: whether a head
    that shares the base model's table changes with it.
    scale, magnitude, bias: as in `LowRank`.
    """

    module: str
    a: np.ndarray
    b: np.ndarray
    rank: int
    scale: float
    parameter: str = ""
    experts: int = 1
    stacked: bool = False
    embedding: bool = False
    tied: bool = False
    magnitude: np.ndarray | None = None
    bias: np.ndarray | None = None

    @property
    def name(self) -> str:
        """The module's name with the parameter's."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


@dataclass(frozen=True, slots=True, eq=False)
class AdapterFile:
    """An adapter as its files say, checked without a model.

    kind: "peft", "gguf" or "mlx". content: hash of what changes the arithmetic, hexadecimal: names and bytes of all
    tensors, ranks and scales, but not the name of the adapter, its folder, or a request's scale.
    base: what it says about its base model ("name", "revision", "architecture").
    saved: whole tensors that replace the base model's, by their names in its checkpoint. tokens: rows that replace
    rows of a table, by the table's module: (ids, rows [n, width]).
    tied: modules of tables whose replacement also replaces a head that shares the base model's table.
    invocation: ids after which the adapter is active (aLoRA, arXiv:2504.12397), () for always. nbytes: of all tensors.
    version: of peft, () if it is not stated.
    """

    kind: str
    path: Path
    content: str
    base: Mapping[str, str]
    updates: tuple[Update, ...]
    saved: Mapping[str, np.ndarray] = field(default_factory=dict)
    tokens: Mapping[str, tuple[tuple[int, ...], np.ndarray]] = field(default_factory=dict)
    tied: frozenset[str] = frozenset()
    invocation: tuple[int, ...] = ()
    nbytes: int = 0
    version: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The change of one matrix W [outputs, inputs]: y = W x + scale * (b (a x) + bias), all of it without the base
    model's own bias. With a magnitude (DoRA, arXiv:2402.09353), row i of W + scale * b a is scaled so that its norm is
    magnitude[i]: y = magnitude / |W + scale b a| * (W x + scale * b (a x)), the norm being that of each row.

    a: [rank, inputs]. b: [outputs, rank]. magnitude, bias: [outputs] or None. All are float32, float16, bfloat16 or
    float64, as in the file, and may be views of it with any strides. Of a table, W is its transpose: inputs are tokens,
    outputs the width, and a token's row changes by scale * b a[:, token], before any factor of the embedded tokens.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None
    bias: np.ndarray | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def delta(self) -> np.ndarray:
        """scale * b a, float32 [outputs, inputs]."""
        return np.float32(self.scale) * (self.b.astype(np.float32) @ self.a.astype(np.float32))

    def factor(self, rows: Callable[[], Iterable[np.ndarray]]) -> np.ndarray:
        """magnitude / |W + scale * b a|, float32 [outputs]. rows: gives W's rows in float32, some at a time. Norms are
        summed in float64; a row of zeros has the factor 0. Raises ModelFileError for norms that are not finite."""
        assert self.magnitude is not None
        a, norms, first = self.a.astype(np.float32), [], 0
        for some in rows():
            b = np.float32(self.scale) * self.b[first : first + len(some)].astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                norms.append(np.linalg.norm((some + b @ a).astype(np.float64), axis=1))
            first += len(some)
        return factors_of(self.magnitude, np.concatenate(norms))

    def merged(self, weight: np.ndarray) -> np.ndarray:
        """The changed matrix, float32 [outputs, inputs], from the base model's: to check results by; serving does not
        merge."""
        whole = weight.astype(np.float32) + self.delta()
        if self.magnitude is None:
            return whole
        norms = np.linalg.norm(whole, axis=1)
        return whole * (self.magnitude.astype(np.float32) / norms)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Rows [n, width] that replace the rows of these ids in a table, or in a head."""

    ids: tuple[int, ...]
    rows: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter by the modules of a model.

    matrices: of linear layers, the router and the head, by slot (`kvasir.layers.adapters.linears`; "head" for the
    head); those of experts as "layers.0.mlp.experts.3.down". tables: of embeddings, by their path ("embed").
    saved: tensors that replace the model's, in the model's shapes, by path and name ("head.weight",
    "layers.0.attn_norm.weight"). tokens: by path of a table or "head".
    content, invocation, nbytes: as in `AdapterFile`.
    """

    kind: str
    content: str
    matrices: Mapping[str, LowRank]
    tables: Mapping[str, LowRank]
    saved: Mapping[str, np.ndarray]
    tokens: Mapping[str, TokenRows]
    invocation: tuple[int, ...] = ()
    nbytes: int = 0

    @property
    def max_rank(self) -> int:
        """The greatest rank; 0 without low-rank changes."""
        return max((change.rank for change in (*self.matrices.values(), *self.tables.values())), default=0)


def content_hash(facts: Any, tensors: Iterable[tuple[str, np.ndarray]]) -> tuple[str, int]:
    """The hash of an adapter's contents, and the bytes of its tensors. facts: JSON values. tensors: by name, read once.

    Raises ModelFileError for values that are not finite."""
    digest, size = hashlib.sha256(), 0
    digest.update(json.dumps(facts, sort_keys=True).encode())
    for name, array in sorted(tensors, key=lambda pair: pair[0]):
        if not all(np.isfinite(part).all() for part in _parts(array)):
            raise ModelFileError(f"tensor {quoted(name)} of the adapter has values that are not finite")
        digest.update(json.dumps(["\n", name, str(array.dtype), array.shape]).encode())
        for part in _parts(array):
            digest.update(np.ascontiguousarray(part).view(np.uint8).data)
        size += array.nbytes
    return digest.hexdigest(), size


def _parts(array: np.ndarray, most: int = 1 << 20) -> Iterable[np.ndarray]:
    """Runs of rows with at most so many values, or one row."""
    if array.ndim < 2 or not array.size:
        return [array.reshape(-1)]
    rows = max(1, most * len(array) // array.size)
    return (array[i : i + rows] for i in range(0, len(array), rows))


def check_dtype(name: str, dtype: str) -> None:
    """Raises UnsupportedModel for tensors that are not of plain floats."""
    if dtype not in FLOATS:
        raise UnsupportedModel(
            f"tensor {quoted(name)} of the adapter is stored as {dtype}, expected {', '.join(FLOATS)}",
            "save the adapter in one of these types",
        )


def check_pair(name: str, a: np.ndarray, b: np.ndarray, rank: int, experts: int = 1) -> None:
    """Raises ModelFileError unless a is [experts * rank, inputs] and b [outputs, experts * rank]."""
    inner = rank * experts
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != inner or b.shape[1] != inner or not a.size or not b.size:
        times = f" for {experts} experts" if experts > 1 else ""
        raise ModelFileError(
            f"the adapter's matrices of {quoted(name)} have shapes {[*a.shape]} and {[*b.shape]}, expected "
            f"[{inner}, inputs] and [outputs, {inner}], of rank {rank}{times}",
            "the config does not belong to these tensors: save the adapter again",
        )


def pair_rank(name: str, a: np.ndarray, b: np.ndarray) -> int:
    """The rank of matrices a [rank, inputs] and b [outputs, rank]. Raises ModelFileError for others."""
    rank = b.shape[1] if b.ndim == 2 and 1 <= b.shape[1] <= MAX_RANK else 1
    check_pair(name, a, b, rank)
    return rank


def stack_rank(name: str, a: np.ndarray, b: np.ndarray) -> int:
    """The rank of stacks a [experts, rank, inputs] and b [experts, outputs, rank]. Raises ModelFileError for others."""
    three = a.ndim == b.ndim == 3
    if not (three and len(a) == len(b) and a.shape[1] == b.shape[2] and a.size and b.size) or not (
        a.shape[1] <= MAX_RANK and len(a) <= MAX_EXPERTS
    ):
        raise ModelFileError(
            f"the adapter's matrices of {quoted(name)} have shapes {[*a.shape]} and {[*b.shape]}, expected "
            f"[experts, rank, inputs] and [experts, outputs, rank], of a rank up to {MAX_RANK}",
            "save the adapter again",
        )
    return a.shape[1]


def check_vector(name: str, what: str, vector: np.ndarray | None, outputs: int) -> None:
    """Raises ModelFileError for a vector of another size."""
    if vector is not None and vector.shape != (outputs,):
        raise ModelFileError(
            f"the adapter's {what} of {quoted(name)} has shape {[*vector.shape]}, expected [{outputs}]",
            "the tensors do not belong together: save the adapter again",
        )


def check_scale(what: str, scale: float) -> float:
    """The scale. Raises ModelFileError if it is not finite or too large."""
    if not abs(scale) <= MAX_SCALE:  # also NaN
        raise ModelFileError(f"{what} is {scale}, expected a number of at most {MAX_SCALE:g}")
    return scale
