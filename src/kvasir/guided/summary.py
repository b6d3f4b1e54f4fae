"""A summary of the schemas in a schema, collected in one walk, so that later passes can see that they have no work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any


@dataclass(slots=True)
class Summary:
    """shapes: the keywords of each schema, in order; even a large schema has few different ones. references: the values
    of `$ref`. old: whether a keyword has a value that only older drafts know."""

    shapes: set[tuple[str, ...]] = field(default_factory=set)
    references: set[str] = field(default_factory=set)
    old: bool = False

    def add(self, schema: Mapping[str, Any]) -> None:
        """Adds one schema."""
        self.shapes.add(tuple(schema))
        if isinstance(reference := schema.get("$ref"), str):
            self.references.add(reference)

    def keywords(self) -> frozenset[str]:
        """All keywords of the schemas."""
        return frozenset(chain.from_iterable(self.shapes))

    def alone(self, key: str, others: Collection[str]) -> bool:
        """Whether a keyword never occurs with keywords other than `others`."""
        return all(key not in shape or set(shape) <= {key, *others} for shape in self.shapes)
