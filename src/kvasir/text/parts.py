"""The parts of a `tokenizers` tokenizer, in the form of tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

Step = Mapping[str, Any]

UNLESS = r"\A(?!"  # a Replace whose pattern begins with this adds a space before a text, unless the text is a token


def steps_of(part: Any) -> list[Step]:
    """The steps of a normalizer or pre-tokenizer, with sequences flattened; empty if `part` is None."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def normalized(library: tokenizers.Tokenizer, text: str) -> str:
    return text if library.normalizer is None else library.normalizer.normalize_str(text)


def prepends(step: Step) -> bool:
    """Whether a normalizer only adds a space before a text."""
    pattern = step["pattern"].get("Regex", "") if step["type"] == "Replace" else ""
    return step["type"] == "Prepend" or (pattern.startswith(UNLESS) and step["content"] == "▁")


def _flat(state: Step) -> list[Step]:
    inner = state.get("normalizers", state.get("pretokenizers"))
    return [state] if inner is None else [step for each in inner for step in _flat(each)]
