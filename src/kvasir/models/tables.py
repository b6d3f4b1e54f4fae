"""The tables of a model that ranks share, whole, for a drafter that one of the ranks computes alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from kvasir.layers.module import Entry, Module

EMBED, HEAD = TABLES = "embed", "head"


class WholeTables(Module):
    """A model's embedding table, or its matrix of logits, or both. asked: which, of TABLES."""

    ignored: Iterable[str] = (r".*",)  # the model has used the rest of the checkpoint

    def __init__(self, model: Any, asked: Iterable[str]):
        self.prefix = model.prefix
        self.leaves_adapters = getattr(model, "leaves_adapters", False)
        whole = type(model)(model.config)
        self.tables: dict[str, Module] = {
            name: table for name in asked if isinstance(table := getattr(whole, name, None), Module)
        }
        vars(self).update(self.tables)
        tied = getattr(self.tables.get(HEAD), "tied", None)
        if tied is not None:
            self.embed = self.tables[EMBED] = tied
        self._names = {path: entry for path, entry in model.names().items() if path in self.tables}

    def names(self) -> Mapping[str, Entry]:
        """As of the model."""
        return self._names

    def matrices(self, model: Any) -> dict[int, Any]:
        """The packed matrices, by the `id()` of the model's module that has a part of each."""
        found = {name: getattr(table, "weight", None) for name, table in self.tables.items()}
        return {id(getattr(model, name)): matrix for name, matrix in found.items()}

    def lent_to(self, model: Any) -> Any:
        """The model with these tables instead of its own."""
        found = copy(model)
        vars(found).update(self.tables)
        return found
