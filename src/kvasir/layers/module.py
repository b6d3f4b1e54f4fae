"""The module tree of a model, and the tensors that its leaves expect.

A leaf (Linear, Norm, Embedding) declares its tensors in `expects` and receives them in `put`; the loader walks the tree
and reads each from the checkpoint. Nothing is allocated before its tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvasir.layers.places import Place
from kvasir.parallel import Mesh

if TYPE_CHECKING:
    from torch import Tensor

    from kvasir.layers.changes import Changes

# for a linear layer whose sum ranks may split: the number of segments of the sum in its weight format
Segments = Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Take:
    """A part of a tensor in a checkpoint: `rows` of the tensor `name`, after transposing it if the checkpoint holds
    [in, out]. name: without ".weight" or ".bias", as in every name table. every: if not 0, `rows` of each run of so
    many rows, in order. order: of the rows taken, the order of those in each run of its length. turned: if not 0, each
    run of so many of the rows taken is transposed, after which [n * turned, K] is [n * K, turned]."""

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False
    every: int = 0
    order: tuple[int, ...] = ()
    turned: int = 0

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The resulting shape for a tensor of shape `stored`. Raises ValueError if the tensor is too small."""
        shape = stored[::-1] if self.transposed else stored
        if self.rows is not None:
            if not shape or self.rows[1] > (self.every or shape[0]) or (self.every and shape[0] % self.every):
                raise ValueError(f"rows {self.rows}{f' of every {self.every}' if self.every else ''} of {shape}")
            runs = shape[0] // self.every if self.every else 1
            shape = (runs * (self.rows[1] - self.rows[0]), *shape[1:])
        if self.order and (not shape or shape[0] % len(self.order)):
            raise ValueError(f"runs of {len(self.order)} rows of {shape}")
        if self.turned:
            if len(shape) != 2 or shape[0] % self.turned:
                raise ValueError(f"runs of {self.turned} rows of {shape}")
            shape = (shape[0] // self.turned * shape[1], self.turned)
        return shape

    def of(self, tensor: Tensor) -> Tensor:
        if self.transposed and tensor.ndim == 2:
            tensor = tensor.T
        rows = self.of_rows(tensor)
        if not self.turned:
            return rows
        return rows.reshape(-1, self.turned, rows.shape[1]).swapaxes(1, 2).reshape(-1, self.turned)

    def of_rows(self, rows: Any) -> Any:
        """The part of an array with one row per output, in any format, before its runs are transposed."""
        if self.rows is not None:
            rows = _of_runs(rows, slice(*self.rows), self.every) if self.every else rows[slice(*self.rows)]
        return _of_runs(rows, list(self.order), len(self.order)) if self.order else rows


# Where a tensor is in a checkpoint: its name, a part of a tensor, or several of these, of which the first that exists
# is used.
Entry = str | Take | tuple[str | Take, ...]


def _of_runs(rows: Any, which: slice | list[int], size: int) -> Any:
    return rows.reshape(-1, size, *rows.shape[1:])[:, which].reshape(-1, *rows.shape[1:])


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a matrix [N, K]: ranges (first, last) of rows and columns. parts: how many ranges the columns
    are split into; with more than one, products are partial sums."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    parts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def of(self, matrix_NK: Tensor) -> Tensor:
        """The part of the matrix, as a view."""
        return matrix_NK[slice(*self.rows), slice(*self.columns)]


class Module:
    """A part of a model. Attributes that are modules, or lists of modules, are its children.

    adaptable: whether it applies the changes of adapters. changes: those of the eager executor, by part.
    """

    adaptable = False
    changes: Mapping[str, Changes[Any]] = MappingProxyType({})

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def walk(self) -> Iterator[tuple[str, Module]]:
        """Every module of the tree with its path ("layers.0.attn.qkv"), this one as "". A module that occurs twice (a
        tied table) is yielded once, under its first path."""
        seen: set[int] = set()
        waiting: list[tuple[str, Module]] = [("", self)]
        for path, module in waiting:
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                waiting += ((f"{path}.{name}" if path else name, child) for name, child in module.children())

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Reduces this rank's modules to their parts; call it before any `put`. The split depends only on the mesh, the
        sizes and the segments; modules that cannot be split stay whole on every rank."""
        for child in dict(self.children()).values():
            child.split(mesh, segments)

    def expects(self) -> dict[str, tuple[int, ...]]:
        """The tensors of this module itself: name ("weight", "q.bias") -> shape in the checkpoint."""
        return {}

    def put(self, name: str, array: Any, place: Place) -> Any:
        """Takes an array of the expected shape and returns what is kept: matrices as the place keeps them, norms and
        biases in float32."""
        raise NotImplementedError(f"{type(self).__name__} has no parameters")


class Vector(Module):
    """A float32 vector of a layer. name: its last name in the checkpoint. shape: there. values: this rank's part."""

    values: Tensor

    def __init__(self, size: int, name: str, shape: tuple[int, ...] = ()):
        self.name, self.shape, self.held = name, shape or (size,), (0, size)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Stays whole; `held` narrows it."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {self.name: self.shape}

    def put(self, name: str, array: Any, place: Place) -> Any:
        self.values = place.exact(array.reshape(-1)[slice(*self.held)])
        return self.values


class Scalar(Module):
    """One number of a layer. name: its last name in the checkpoint."""

    value = 1.0

    def __init__(self, name: str):
        self.name = name

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (1,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array)
        self.value = float(kept[0])
        return kept
