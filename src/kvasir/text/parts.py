"""The parts of a `tokenizers` tokenizer, in the form of tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

Component = Mapping[str, Any]

UNLESS = r"\A(?!"  # a Replace whose pattern begins with this adds a space before a text, unless the text is a token


def components_of(part: Any) -> list[Component]:
    """The components of a normalizer or pre-tokenizer, with sequences flattened; empty if `part` is None."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def normalized(library: tokenizers.Tokenizer, text: str) -> str:
    return text if library.normalizer is None else library.normalizer.normalize_str(text)


def prepends(component: Component) -> bool:
    """Whether a normalizer only adds a space before a text."""
    pattern = component["pattern"].get("Regex", "") if component["type"] == "Replace" else ""
    return component["type"] == "Prepend" or (pattern.startswith(UNLESS) and component["content"] == "▁")


def _flat(state: Component) -> list[Component]:
    inner = state.get("normalizers", state.get("pretokenizers"))
    return [state] if inner is None else [component for each in inner for component in _flat(each)]
