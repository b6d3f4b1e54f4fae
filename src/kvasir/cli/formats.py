"""How models write calls of tools and reasoning, as their chat templates show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_text
from kvasir.engine.reading import SOME_TOOL, Reader
from kvasir.errors import KvasirError
from kvasir.store.store import Store


@dataclass(frozen=True, slots=True)
class Formats:
    """Names of formats, "none" where there is none. fault: why calls are not recognised in text, or what is wrong with
    the model; "" where nothing is."""

    model: str
    tools: str = "none"
    reasoning: str = "none"
    fault: str = ""


def formats(models: Sequence[str] = ()) -> Iterator[Formats]:
    """Of these models and the store's that have a chat template. Raises nothing."""
    for model in dict.fromkeys((*models, *_stored())):
        try:
            found = _formats(model)
        except KvasirError as error:
            found = Formats(model, fault=error.message)
        if found:
            yield found


def _stored() -> list[str]:
    try:
        return [entry.name for entry in Store().list()]
    except (KvasirError, OSError):  # nothing is kept here, or not for this user
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
