"""The tokens that two vocabularies have in common."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.text.tokenizer import Tokenizer


def shared_ids(first: Tokenizer, second: Tokenizer, size: int) -> list[int] | None:
    """For each id of the first vocabulary, the second's id of the same token, -1 where it has none; None if all tokens
    have equal ids in both. size: of the result; a model may have more ids than its tokenizer.

    Tokens are the same if they stand for the same bytes, however their vocabularies spell them (`Ġthe`, `▁the`);
    special tokens if they have the same text. The first token that ends a text is the same in both. Of several tokens
    with the same bytes, the first counts.
    """
    if first.table.tokens == second.table.tokens and first.special_ids == second.special_ids:
        return None
    there: dict[tuple[bool, bytes], int] = {}
    for key, i in _tokens(second, second.vocab_size):
        there.setdefault(key, i)
    found = [-1] * size
    for key, i in _tokens(first, min(size, first.vocab_size)):
        found[i] = there.get(key, -1)
    if first.eos_ids and second.eos_ids and first.eos_ids[0] < size:
        found[first.eos_ids[0]] = second.eos_ids[0]
    return found


def _tokens(tokenizer: Tokenizer, size: int) -> Iterator[tuple[tuple[bool, bytes], int]]:
    """Whether a token is special and its bytes, with its id."""
    for i in range(size):
        if data := tokenizer.token_bytes(i):
            yield (i in tokenizer.special_ids, data), i
