"""The parts of a tokenizer of the `tokenizers` library, as tokenizer.json writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tokenizers

Step = Mapping[str, Any]

UNLESS = r"\A(?!"  # a Replace of a pattern that begins so puts a space before a text, unless that is a token


def steps_of(part: Any) -> list[Step]:
    """The steps of a normalizer or pre-tokenizer, sequences taken apart; none where there is no such part."""
    return [] if part is None else _flat(json.loads(part.__getstate__()))


def normalized(library: tokenizers.Tokenizer, text: str) -> str:
    return text if library.normalizer is None else library.normalizer.normalize_str(text)


def prepends(step: Step) -> bool:
    """Whether a normalizer puts a space before a text, and does nothing else."""
    pattern = step["pattern"].get("Regex", "") if step["type"] == "Replace" else ""
    return step["type"] == "Prepend" or (pattern.startswith(UNLESS) and step["content"] == "▁")


def _flat(state: Step) -> list[Step]:
    inner = state.get("normalizers", state.get("pretokenizers"))
    return [state] if inner is None else [step for each in inner for step in _flat(each)]
