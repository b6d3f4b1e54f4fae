"""The tokens that two vocabularies have in common."""

from __future__ import annotations

import tokenizers

from kvasir.text.shared_tokens import shared_ids
from kvasir.text.special_tokens import SpecialTokens
from kvasir.text.tokenizer import Tokenizer
from tests.text.test_speller import byte_level, metaspace


def made(backend: tokenizers.Tokenizer, end: str) -> Tokenizer:
    backend.add_special_tokens([end, "<call>"])
    end_id = backend.token_to_id(end)
    assert end_id is not None
    return Tokenizer.in_process(backend, SpecialTokens(eos_ids=(end_id,)))


def test_tokens_are_the_same_if_their_bytes_are():
    spaced, byted = made(metaspace(), "</s>"), made(byte_level(), "<end>")
    size = spaced.vocab_size + 5
    found = shared_ids(spaced, byted, size)
    assert found is not None and len(found) == size and found[spaced.vocab_size :] == [-1] * 5
    pairs = {"▁": "Ġ", "a": "a", "<0x0A>": "Ċ", "<0xFF>": "ÿ", "</s>": "<end>", "<call>": "<call>"}
    assert {a: byted.id_to_token(found[spaced.token_to_id(a) or 0]) for a in pairs} == pairs
    assert found[spaced.token_to_id("▁a") or 0] == found[0] == -1, "▁a is in no token of the other, nor is <unk>"
    for i, there in enumerate(found):
        if there >= 0 and i not in spaced.special_ids:
            assert spaced.token_bytes(i) == byted.token_bytes(there)
    back = shared_ids(byted, spaced, byted.vocab_size)
    assert back is not None and back[byted.token_to_id("ab") or 0] == -1 and back.count(-1) == 1
    assert back[byted.token_to_id("Ġ") or 0] in (spaced.token_to_id("<0x20>"), spaced.token_to_id("▁"))


def test_text_that_looks_like_a_special_token_is_none():
    marked, plain = metaspace(), metaspace()
    marked.add_special_tokens(["<call>"])
    plain.add_tokens([tokenizers.AddedToken("<call>", normalized=False)])
    first, second = (Tokenizer.in_process(one, SpecialTokens()) for one in (marked, plain))
    found = shared_ids(first, second, first.vocab_size)
    assert found is not None and found.count(-1) == 1 and found[-1] == -1


def test_equal_vocabularies_need_no_table():
    assert shared_ids(made(metaspace(), "</s>"), made(metaspace(), "</s>"), 400) is None
