"""The store's facts about a model: where its weights are, their format, and how to run it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from kvasir.store.names import Name, parse_name

ADAPTER = "adapter"  # the capability of an entry that is an adapter, not a model
Value = bool | int | float | str | list[str]


@dataclass(frozen=True, slots=True)
class Weights:
    """path: the absolute path of a folder or a .gguf file (the first of its parts). size: bytes of all weight files.
    digest: SHA-256 in hexadecimal, of the file or, if there are several, of their names and digests. files: the SHA-256
    of each file by name. source: the reference that was pulled. revision: the hub's commit, or ""."""

    path: str
    format: Literal["gguf", "safetensors"]
    size: int
    digest: str
    files: dict[str, str] = field(default_factory=dict)
    source: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True)
class Details:
    """Facts from the files' headers. parameter_size and quantization_level in Ollama's notation ("7.6B", "Q4_K_M").
    kv_bytes_per_token: of all layers at 16 bits; 0 if unknown."""

    family: str = ""
    parameters: int = 0
    parameter_size: str = ""
    quantization_level: str = ""
    context_length: int = 0
    embedding_length: int = 0
    kv_bytes_per_token: int = 0
    template: str | None = None
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftEntry:
    """The model or head that drafts for a model. quantize: q8, q4 or none while loading; None loads it as the model."""

    weights: Weights
    details: Details = Details()
    quantize: str | None = None


@dataclass(frozen=True)
class ModelEntry:
    """One model. `parameters` have Ollama's names (`parameters.py`). template: a Jinja text in place of the template in
    the weights; None uses the latter. quantize: q8 or q4 while loading. parent: the name of the model it was made from.
    draft: what drafts for it. adapters: applied to all its requests. created, modified: seconds since 1970."""

    name: str
    weights: Weights
    details: Details = Details()
    template: str | None = None
    system: str | None = None
    parameters: dict[str, Value] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()
    license: tuple[str, ...] = ()
    quantize: str | None = None
    requires: str = ""
    parent: str = ""
    draft: DraftEntry | None = None
    adapters: tuple[Weights, ...] = ()
    created: float = 0.0
    modified: float = 0.0

    @property
    def all_weights(self) -> tuple[Weights, ...]:
        """Its own, those of what drafts for it, and those of its adapters."""
        draft = (self.draft.weights,) if self.draft else ()
        return (self.weights, *draft, *self.adapters)

    @property
    def is_adapter(self) -> bool:
        """Whether it is an adapter rather than a model."""
        return ADAPTER in self.details.capabilities

    @property
    def size(self) -> int:
        """Bytes of all weight files."""
        return sum(weights.size for weights in self.all_weights)

    @property
    def parsed(self) -> Name:
        return parse_name(self.name)

    @cached_property
    def digest(self) -> str:
        """SHA-256 in hexadecimal over everything that identifies the model; a copy has the same digest. The hashed data
        may be megabytes long."""
        own = (self.template, self.system, self.parameters, self.messages, self.license, self.quantize)
        draft = (self.draft.weights.digest, self.draft.quantize) if self.draft else ()
        adapters = [[weights.digest for weights in self.adapters]] if self.adapters else []
        encoded = msgspec.json.encode([self.weights.digest, *own, *draft, *adapters], order="sorted")
        return hashlib.sha256(encoded).hexdigest()

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages of a chat, preceded by the model's own; a system message in the chat replaces the model's."""
        own: list[Mapping[str, Any]] = list(self.messages)
        begins_with_system = bool(messages) and messages[0].get("role") in ("system", "developer")
        if self.system and not begins_with_system:
            own.insert(0, {"role": "system", "content": self.system})
        return [*own, *messages]
