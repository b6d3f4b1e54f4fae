"""The matrices, tables and other tensors of a model that an adapter may change, by their names in its checkpoint.

The names come from the model's own name table, by which its weights are loaded: so adapters of any family are found
without code for the family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import Head, HeadLinear, Linear
from kvasir.layers.module import Module, Take
from kvasir.layers.moe import MoE
from kvasir.lora.peft import PREFIX
from kvasir.weights.load import spellings

HEAD = "head"
# Other spellings of the same module: of classes that wrap a decoder, and of experts in other versions of a class.
_ALIASES = (
    ("model.language_model.", "language_model.model."),
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.model.", "model.language_model."),
    ("model.", "model.language_model."),
)
_EXPERT_ALIASES = ((".mlp.", ".block_sparse_moe."), (".block_sparse_moe.", ".mlp."), (".mlp.", ".feed_forward."))
# Parts of an expert, by the name of the parameter that holds all experts' matrices: below each other, in this order.
STACKED = {
    "gate_up_proj": ("gate_up.gate", "gate_up.up"),
    "gate_proj": ("gate_up.gate",),
    "up_proj": ("gate_up.up", "up"),
    "down_proj": ("down",),
}


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor of a model. path: of its module and part ("layers.0.attn.qkv.q"). name: the tensor's last name. shape:
    in the model. take: the part of the checkpoint's tensor that it is, None for all of it."""

    path: str
    name: str
    shape: tuple[int, ...]
    leaf: Module
    take: Take | None = None

    @property
    def full(self) -> str:
        return f"{self.path}.{self.name}"

    @property
    def is_matrix(self) -> bool:
        """Whether a low-rank pair may be added to it as a linear layer."""
        turned = self.take is not None and self.take.turned
        return (
            self.name == "weight"
            and isinstance(self.leaf, Linear)
            and not isinstance(self.leaf, HeadLinear)
            and not turned
        )

    @property
    def is_table(self) -> bool:
        return self.name == "weight" and isinstance(self.leaf, Embedding) and self.take is None


class Targets:
    """All places of a model."""

    def __init__(self, model: Any):
        """model: with or without weights."""
        self.model, self.kind = model, type(model).__name__
        self.prefix: str = model.prefix
        self._places: dict[str, list[Place]] = {}
        self._mixtures: dict[str, tuple[str, int]] = {}  # by the checkpoint's name of the experts: path, their number
        self.tied = self._tied_head()
        self.places: dict[str, Place] = {}
        for place, names in self._all():
            self.places[place.full] = place
            for name in names:
                self._places.setdefault(name, []).append(place)
        self._find_mixtures()

    def _all(self) -> Iterator[tuple[Place, list[str]]]:
        """Every tensor with its names in the checkpoint."""
        table = self.model.names()
        for path, leaf in self.model.walk():
            for name, shape in leaf.expects().items():
                inner, _, kind = f"{path}.{name}".rpartition(".")
                for take, stored in spellings(table, f"{path}.{name}"):
                    # A tied table may be stored as the head; but then the head is what is meant by that name.
                    if not (self.tied and isinstance(leaf, Embedding) and stored == self._head_name):
                        yield Place(inner, kind, shape, leaf, take), [stored]
        if self.tied is not None:
            head = Place(HEAD, "weight", (self.tied.outputs["weight"], self.tied.inputs), self.tied)
            yield head, [self._head_name]

    def _tied_head(self) -> Head | None:
        head = getattr(self.model, HEAD, None)
        return head if isinstance(head, Head) and head.tied is not None else None

    @property
    def _head_name(self) -> str:
        return spellings(self.model.names(), f"{HEAD}.weight")[0][1]

    def _find_mixtures(self) -> None:
        mixtures = {path: len(part.experts) for path, part in self.model.walk() if isinstance(part, MoE)}
        for name, places in list(self._places.items()):
            found = re.fullmatch(r"(.+\.experts)\.0\..+", name)
            mixture = places[0].path.partition(".experts.")[0]
            if found and mixture in mixtures:
                self._mixtures[found[1]] = mixture, mixtures[mixture]

    def tensor(self, name: str) -> list[Place]:
        """The places of a tensor of the checkpoint, [] if there is none. One tensor may be in several places."""
        return next((self._places[one] for one in self._spellings(name) if one in self._places), [])

    def mixture(self, name: str) -> tuple[str, int] | None:
        """Path and number of the experts of a module that holds all of them."""
        return next((self._mixtures[one] for one in self._spellings(name) if one in self._mixtures), None)

    def expert(self, path: str, number: int, parameter: str) -> list[Place]:
        """The places of an expert's part of a parameter, in the order of its rows; [] if the model has none."""
        names = (f"{path}.experts.{number}.{part}.weight" for part in STACKED.get(parameter, ()))
        return [self.places[name] for name in names if name in self.places]

    def _spellings(self, name: str) -> Iterator[str]:
        name = name.removeprefix(PREFIX)
        for first in (name, *_renamed(name, _ALIASES, start=True)):
            for second in (first, *_renamed(first, _EXPERT_ALIASES)):
                yield from (second, self.prefix + second, second.removeprefix(self.prefix))


def _renamed(name: str, aliases: tuple[tuple[str, str], ...], start: bool = False) -> Iterator[str]:
    for old, new in aliases:
        if name.startswith(old) if start else old in name:
            yield name.replace(old, new, 1)
