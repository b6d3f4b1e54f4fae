"""The formats of tool calls and reasoning, detected from models' chat templates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_text
from kvasir.engine.reading import SOME_TOOL, Reader
from kvasir.errors import KvasirError
from kvasir.store.store import ModelStore


@dataclass(frozen=True, slots=True)
class Formats:
    """Names of formats, "none" if there is none. fault: why calls in text are not recognized, or the problem with the
    model; "" if there is no problem."""

    model: str
    tools: str = "none"
    reasoning: str = "none"
    fault: str = ""


def formats(models: Sequence[str] = ()) -> Iterator[Formats]:
    """The formats of these models, and of the store's models with a chat template. Problems with a model are reported
    as its `fault`."""
    for model in dict.fromkeys((*models, *_stored())):
        try:
            found = _formats(model)
        except KvasirError as error:
            found = Formats(model, fault=error.message)
        if found:
            yield found


def _stored() -> list[str]:
    try:
        return [entry.name for entry in ModelStore().list() if not entry.is_adapter]
    except (KvasirError, OSError):  # there is no store, or this user may not read it
        return []


def _formats(model: str) -> Formats | None:
    tokenizer, template = load_text(resolve(EngineOptions(model))[0])
    try:
        if not template.sources:
            return None
        reader = Reader(tokenizer, template)
        reader.learn_all()
        format = reader.format([SOME_TOOL])
        return Formats(model, format.calls.name, format.thinking.name if format.thinking else "none", reader.fault())
    finally:
        template.close()
        if tokenizer is not None:
            tokenizer.close()
