"""Lookup of table rows by id: tokens, positions, token types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.layers.changes import change_lookup
from kvasir.layers.module import Module, Segments, Shard
from kvasir.layers.places import Place
from kvasir.ops.collective import pick_rows
from kvasir.ops.embedding import embedding, row, type_rows
from kvasir.parallel import SOLO, Cut, Mesh, cut

if TYPE_CHECKING:
    from torch import Tensor

PANEL = 16  # rows per panel of a packed matrix


class Embedding(Module):
    """ids: int64 [T] -> float32 [T, width]."""

    adaptable = True

    def __init__(self, size: int, width: int):
        self.size, self.width = size, width
        self.weight: Tensor
        self.rows = (0, size)  # held by this rank
        self.place: Place | None = None  # of the weight, unless it is packed

    def __call__(self, ids_T: Tensor) -> Tensor:
        rows_TD = self.look_up(ids_T)
        if "weight" not in self.changes:
            return rows_TD
        return change_lookup(rows_TD, ids_T, tuple(self.changes["weight"].in_effect()))

    def look_up(self, ids_T: Tensor) -> Tensor:
        """The rows of the model's own table, float32 [T, width]."""
        return embedding(ids_T, self.weight)

    def of_types(self, types_T: Tensor) -> Tensor:
        """Rows by token type, float32 [T, width]."""
        return type_rows(types_T, self.weight)

    def row(self, index: int) -> Tensor:
        """One row, float32 [width], for adding to every token."""
        return row(self.weight, index)

    def hold(self, name: str, matrix: Any) -> None:
        """Takes the table as a packed matrix (kvasir.ops.linear.packed) instead of a tensor."""
        self.weight = matrix

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.size, self.width)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        self.place, self.weight = place, place.matrix(self.shard(name).of(array))
        return self.weight

    def shard(self, name: str) -> Shard:
        return Shard(self.rows, (0, self.width))


def vocabulary_cut(size: int, mesh: Mesh) -> Cut:
    """How ranks split a vocabulary: in whole panels, so that only the last panel of the vocabulary needs padding."""
    return cut(size, mesh.most_parts(lambda parts: parts * PANEL <= size), PANEL)


class VocabularyEmbedding(Embedding):
    """The token embedding table; each rank may hold a part of its rows."""

    mesh: Mesh = SOLO

    def __init__(self, size: int, width: int):
        super().__init__(size, width)
        self.table = cut(size, 1)

    def look_up(self, ids_T: Tensor) -> Tensor:
        if self.table.parts == 1:
            return super().look_up(ids_T)
        return pick_rows(embedding(ids_T, self.weight, self.rows[0]), ids_T, self.mesh, self.table)

    def split(self, mesh: Mesh, segments: Segments) -> None:
        self.mesh, self.table = mesh, vocabulary_cut(self.size, mesh)
        self.rows = self.table.range(mesh.part(self.table.parts))
