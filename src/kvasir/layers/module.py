"""The tree of a model's parts, and the tensors that its leaves wait for.

A leaf (Linear, Norm, Embedding) declares its tensors in `expects` and takes them by `put`; the loader walks
the tree and asks the checkpoint for each. Nothing is allocated before its tensor comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvasir.parallel import Mesh

# of a linear whose sum ranks may share: in how many segments its format cuts the sum
Segments = Callable[[Any], int]


@dataclass(frozen=True, slots=True)
class Take:
    """Where a tensor lies in a checkpoint, if it is not simply there: `rows` of the tensor `name`, after
    transposing it where the checkpoint holds [in, out]. `name` is without ".weight" or ".bias", as in every
    name table."""

    name: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of what is taken from a tensor of shape `stored`; ValueError where it cannot be."""
        shape = stored[::-1] if self.transposed else stored
        if self.rows is None:
            return shape
        if not shape or self.rows[1] > shape[0]:
            raise ValueError(f"rows {self.rows} of {shape}")
        return (self.rows[1] - self.rows[0], *shape[1:])

    def of(self, tensor: Tensor) -> Tensor:
        if self.transposed and tensor.dim() == 2:
            tensor = tensor.T
        return self.of_rows(tensor)

    def of_rows(self, rows: Any) -> Any:
        """Of what is stored with one row for each output, in whatever format."""
        return rows if self.rows is None else rows[self.rows[0] : self.rows[1]]


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank holds of a matrix [N, K]: rows and columns, (first, last) of each. parts: in how many the columns are
    cut, so that products are the part of a sum."""

    rows: tuple[int, int]
    columns: tuple[int, int]
    parts: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]

    def of(self, matrix_NK: Tensor) -> Tensor:
        """A view."""
        return matrix_NK[slice(*self.rows), slice(*self.columns)]


class Module:
    """A part of a model. Attributes that are modules, or lists of them, are its children."""

    def children(self) -> Iterator[tuple[str, Module]]:
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                for i, item in enumerate(value):
                    if isinstance(item, Module):
                        yield f"{name}.{i}", item

    def walk(self) -> Iterator[tuple[str, Module]]:
        """Every module of the tree with its path ("layers.0.attn.qkv"), this one as "". One that is held in
        two places (a tied table) comes once, by the first."""
        seen: set[int] = set()
        waiting: list[tuple[str, Module]] = [("", self)]
        for path, module in waiting:
            if id(module) not in seen:
                seen.add(id(module))
                yield path, module
                waiting += ((f"{path}.{name}" if path else name, child) for name, child in module.children())

    def split(self, mesh: Mesh, segments: Segments) -> None:
        """Before any tensor comes: leaves to this rank its part, which depends on nothing but the sizes. What has no
        part stays whole on every rank."""
        for child in dict(self.children()).values():
            child.split(mesh, segments)

    def expects(self) -> dict[str, tuple[int, ...]]:
        """The tensors that this module itself waits for: name ("weight", "q.bias") -> shape in the
        checkpoint."""
        return {}

    def put(self, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Takes the tensor, of the expected shape, and returns what it keeps (which may share its memory).

        dtype is for weights of matrices; norms and biases are kept in float32.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no tensors")
