"""Answers that a grammar allows, chosen at random."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

import kvasir
from kvasir.guided.guide import AnyGuide, GrammarGuides
from kvasir.guided.vocabulary import Vocabulary
from tests.text.vocabularies import local_folder

TOKENIZER = local_folder(Path(kvasir.__file__).parent / "assets" / "kvasir-mini")
VOCAB = TOKENIZER.vocab_size

VOCABULARY = Vocabulary(TOKENIZER, VOCAB, TOKENIZER.eos_ids)
SPECIALS = VOCABULARY.specials
BROKEN = Vocabulary(TOKENIZER, VOCAB - 1)  # of a model that has fewer ids than its tokenizer


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_guides() -> GrammarGuides:
    return GrammarGuides(lambda: VOCABULARY)


def allowed_ids(guide: AnyGuide) -> list[int]:
    mask = guide.allowed()
    if mask is None:
        return list(range(VOCAB))
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits[:VOCAB]).tolist()


def walk(
    guide: AnyGuide, seed: int, jump: bool = False, limit: int = 400, first: tuple[int, ...] = ()
) -> list[int] | None:
    """Ids up to the end of an answer, without the id that ends it; None where there was none within `limit`.

    jump: takes what is forced at once. first: ids to be taken before any are drawn, as far as they are allowed.
    """
    ids: list[int] = []
    wanted = list(first)
    while not guide.done and len(ids) < limit:
        if jump and (forced := guide.forced()):
            ids += forced
            guide.advance(forced)
            continue
        rng = random.Random(seed * 1000 + len(ids))  # of the place alone, as in the sampler
        allowed = allowed_ids(guide)
        wanted = wanted if wanted and wanted[0] in allowed else []
        token = wanted.pop(0) if wanted else rng.choice(_likely(allowed, rng))
        if token in TOKENIZER.eos_ids:
            return ids
        ids.append(token)
        guide.advance([token])
    return ids if guide.done else None


def _likely(allowed: list[int], rng: random.Random) -> list[int]:
    """Ends are preferred, or texts would hardly ever come to theirs."""
    ends = [i for i in allowed if i in TOKENIZER.eos_ids or TOKENIZER.token_text(i) in {'"', "}", "]", '"}', '"]'}]
    return ends if ends and rng.random() < 0.3 else allowed


def assert_equal(one: AnyGuide, other: AnyGuide, seed: int, steps: int = 8) -> None:
    """Asserts that both guides have the same state: equal masks, now and after random ids."""
    for i in range(steps):
        assert one.done == other.done and one.quiet == other.quiet
        if one.done:
            return
        assert (one.allowed(), one.forced()) == (other.allowed(), other.forced())
        token = random.Random(seed + i).choice(allowed_ids(one))
        if token in TOKENIZER.eos_ids:
            return
        one.advance([token])
        other.advance([token])
