"""Descriptions of a model in this API: from its store entry, or, on a server of one model, from its engine."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvasir.parse.format import Style
from kvasir.serve.dialects.ollama.answer import timestamp
from kvasir.serve.hosting.catalogue import Card
from kvasir.serve.hosting.offers import Offer
from kvasir.serve.hosting.serving import Serving
from kvasir.store.entry import ModelEntry
from kvasir.store.modelfile import Modelfile, write_modelfile
from kvasir.types import Task

_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def summary(entry: ModelEntry) -> dict[str, Any]:
    """The entry of a listing."""
    details, weights = entry.details, entry.weights
    details_object = _details(
        weights.format, details.family, details.parameter_size, details.quantization_level, entry.parent
    )
    return _summary(entry.name, entry.modified, entry.size, entry.digest, details_object)


def summary_of(offer: Offer) -> dict[str, Any]:
    """The same for a model that may be loaded, from the store or not."""
    if offer.entry is not None:
        return summary(offer.entry)
    details = offer.details
    details_object = _details("", details.family, details.parameter_size, details.quantization_level)
    return _summary(offer.name, offer.created, offer.size, _hex(offer.identity), details_object)


def summary_of_one(serving: Serving, name: str) -> dict[str, Any]:
    """The same for a model that is not from the store. size: bytes of its matrices. digest: hash of its name and
    fingerprint."""
    info = serving.front.info
    details_object = _details("", info.architecture, _count(info.num_parameters), info.dtype)
    digest = _hex(f"{serving.names[0]} {serving.fingerprint}")
    return _summary(name, serving.created, info.weight_bytes_read, digest, details_object)


def summary_of_adapter(model: dict[str, Any], card: Card) -> dict[str, Any]:
    """The same for an adapter. model: the entry of its model."""
    names = {"name": card.name, "model": card.name, "digest": _hex(f"{model['digest']} {card.name}")}
    return {**model, **names, "details": {**model["details"], "parent_model": card.parent}}


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _summary(name: str, modified: float, size: int, digest: str, details: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"name": name, "model": name, "modified_at": timestamp(modified), "size": size, "digest": digest},
        "details": details,
    }


def _details(format: str, family: str, size: str, quantization: str, parent: str = "") -> dict[str, Any]:
    return {
        **{"parent_model": parent, "format": format, "family": family, "families": [family] if family else []},
        **{"parameter_size": size, "quantization_level": quantization},
    }


def _count(parameters: int) -> str:
    """ "7.6B", "494.03M": in Ollama's notation."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.2f}".rstrip("0").rstrip(".") + letter
    return str(parameters) if parameters else ""


def shown(entry: ModelEntry, facts: dict[str, Any]) -> dict[str, Any]:
    """All that /api/show reports of a store entry. facts: metadata from the headers of its weight files."""
    details = entry.details
    recipe = Modelfile(
        (entry.weights.source or entry.name,),
        entry.parameters,
        entry.template,
        entry.system,
        entry.messages,
        entry.license,
        entry.requires,
        draft=_drafter(entry),
        adapters=tuple(weights.source or Path(weights.path).name for weights in entry.adapters),
    )
    return {
        "license": "\n".join(entry.license),
        "modelfile": write_modelfile(recipe),
        "parameters": parameters_text(entry.parameters),
        "template": entry.template or details.template or "",
        "system": entry.system or "",
        "messages": list(entry.messages),
        "requires": entry.requires,
        "details": summary(entry)["details"],
        "model_info": facts,
        "capabilities": list(details.capabilities),
        "modified_at": timestamp(entry.modified),
    }


def _drafter(entry: ModelEntry) -> str | None:
    """What drafts for the model, as a Modelfile names it; the name of its file if it was uploaded."""
    draft = entry.draft
    return None if draft is None else draft.weights.source or Path(draft.weights.path).name


def shown_of(offer: Offer) -> dict[str, Any]:
    """The same for a model that is neither in the store nor loaded."""
    details = offer.details
    return {
        "modelfile": write_modelfile(Modelfile((offer.name,))),
        "template": details.template or "",
        "details": summary_of(offer)["details"],
        "model_info": _info(details.family, details.parameters, details.context_length, details.embedding_length),
        "capabilities": list(details.capabilities),
        "modified_at": timestamp(offer.created),
    }


def shown_of_one(serving: Serving, name: str) -> dict[str, Any]:
    info, front = serving.front.info, serving.front
    parameters = {k.replace("repetition_penalty", "repeat_penalty"): v for k, v in info.default_sampling.items()}
    sources = front.template.sources if front.template else {}
    return {
        "license": "",
        "modelfile": write_modelfile(Modelfile((name,), draft=serving.entry and _drafter(serving.entry))),
        "parameters": parameters_text(parameters),
        "template": sources.get("default", ""),
        "system": "",
        "details": summary_of_one(serving, name)["details"],
        "model_info": _info(info.architecture, info.num_parameters, info.max_model_len, info.embedding_size),
        "capabilities": capabilities(serving),
        "modified_at": timestamp(serving.created),
    }


def _info(family: str, parameters: int, context: int, embedding: int) -> dict[str, Any]:
    """Model facts under GGUF's names."""
    return {
        "general.architecture": family,
        "general.parameter_count": parameters,
        f"{family}.context_length": context,
        f"{family}.embedding_length": embedding,
    }


def capabilities(serving: Serving) -> list[str]:
    front = serving.front
    format = front.reader.format([_TOOL]) if front.template and front.template.sources else None
    can = {
        "completion": Task.GENERATE in front.info.tasks,
        "tools": format is not None and format.calls.style is not Style.NONE,
        "thinking": format is not None and format.thinking is not None,
        "insert": front.infill is not None,
        "embedding": Task.EMBED in front.info.tasks,
    }
    return [name for name, able in can.items() if able]


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """One line for each value, as Ollama prints them."""
    pairs = [(k, v) for k, given in parameters.items() for v in (given if isinstance(given, list) else [given])]
    return "\n".join(f"{name:<30} {msgspec.json.encode(value).decode()}" for name, value in pairs)
