"""What grammars must know of a vocabulary."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property

from kvasir.text.tokenizer import Tokenizer

HIDDEN = "\U0010fffd"  # of private use


@dataclass(frozen=True)
class Vocabulary:
    """size: columns of the logits. eos_ids: ids that end an answer."""

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...] = ()

    @cached_property
    def json(self) -> str:
        """As tokenizer.json has it, but that nobody writes the special tokens by chance: a text that a grammar forces
        is spelt in tokens of text, also where it looks like a special one."""
        content = json.loads(self.tokenizer.to_json())
        hidden = {text: f"{HIDDEN}{text}" for text in (*self.specials, *self.ends)}
        for token in content.get("added_tokens", ()):
            if token["content"] in hidden:
                token |= {"content": hidden[token["content"]], "special": True}
        vocab = content.get("model", {}).get("vocab")
        if isinstance(vocab, dict):
            content["model"]["vocab"] = {hidden.get(text, text): i for text, i in vocab.items()}
        elif isinstance(vocab, list):
            content["model"]["vocab"] = [[hidden.get(text, text), score] for text, score in vocab]
        return json.dumps(content)

    @cached_property
    def spelt(self) -> tuple[tuple[int, bytes], ...]:
        """All ids that stand for bytes, with these."""
        known = ((i, self.tokenizer.token_bytes(i)) for i in range(min(self.size, self.tokenizer.vocab_size)))
        return tuple((i, data) for i, data in known if data)

    @cached_property
    def _containing(self) -> dict[frozenset[int], tuple[tuple[int, bytes], ...]]:
        return {}

    def containing(self, some: frozenset[int]) -> tuple[tuple[int, bytes], ...]:
        """Those of `spelt` that have one of these bytes; a moment's work, the first time."""
        if some not in self._containing:
            self._containing[some] = tuple((i, data) for i, data in self.spelt if not some.isdisjoint(data))
        return self._containing[some]

    @cached_property
    def ends(self) -> frozenset[str]:
        """Texts of the tokens that end an answer."""
        return frozenset(text for text, i, _ in self.tokenizer.added_tokens if i in self.eos_ids)

    @cached_property
    def specials(self) -> dict[str, int]:
        """Ids by their texts of the tokens that are no text to a grammar, but those that end an answer.

        llguidance takes for such the special tokens, and added ones that look like <tags>."""
        return {
            text: i
            for text, i, special in self.tokenizer.added_tokens
            if i not in self.eos_ids and (special or (text.startswith("<") and text.endswith(">")))
        }
