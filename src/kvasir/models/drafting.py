"""Which layers for multi-token prediction a decoder has, and where its checkpoint has them (`kvasir.models.mtp`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Drafting:
    """A decoder's layers for multi-token prediction, and where its checkpoint has them.

    config: of a decoder that has these layers after its own. layer: the prefix of their tensors, with "*" for the
    layer's number; first: the number of the first one. joint, embed_norm, hidden_norm, norm: the names of the matrix
    over both inputs, of its inputs' norms, and of the last norm. renamed: parts of a block with other names than in the
    decoder's own layers. carries_normed: whether the next layer reads the rows after the last norm.
    """

    config: Any
    layer: str
    first: int
    joint: str
    embed_norm: str
    hidden_norm: str
    norm: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    carries_normed: bool = True


def longer(config: Any, count: int, **settings: Any) -> Any:
    """A decoder's config with `count` more layers. settings: their value of each field that has one per layer."""
    more = {name: (*getattr(config, name), *(value,) * count) for name, value in settings.items()}
    return replace(config, num_layers=config.num_layers + count, **more)
