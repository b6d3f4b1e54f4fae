"""Philox against the known answers of Random123 and against Python integers; its words are uniform."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.sampling.philox import block_words, philox4x32, split_seed, token_words
from kvasir.seeds import answer_seed, draw_seed
from tests.sampling import oracle

WORDS = st.integers(0, 2**32 - 1)


def tensors(words):
    return [torch.tensor([w], dtype=torch.int64) for w in words]


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_known_answers(counter, key, answer):
    parse = [[int(word, 16) for word in text.split()] for text in (counter, key, answer)]
    assert [w.item() for w in philox4x32(tensors(parse[0]), tensors(parse[1]))] == parse[2]
    assert oracle.philox(parse[0], parse[1]) == parse[2]


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_equals_python_integers(counter, key):
    assert [w.item() for w in philox4x32(tensors(counter), tensors(key))] == oracle.philox(counter, key)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31), st.lists(st.integers(0, 2**22), min_size=1))
def test_words_of_a_token_do_not_depend_on_the_batch(seed, position, tokens):
    key = tensors(split_seed(seed))
    words = token_words(key, torch.tensor([position]), torch.tensor(tokens))
    assert words.tolist() == [oracle.word(seed, position, t) for t in tokens]


def test_blocks_are_the_words_of_their_tokens():
    key = tensors(split_seed(2**63 + 12345))
    blocks = block_words(key, torch.tensor([77]), torch.arange(1000))
    assert torch.equal(blocks.flatten(), token_words(key, torch.tensor([77]), torch.arange(4000)))


def test_streams_positions_and_seeds_give_other_words():
    ids = torch.arange(64)
    kinds = [(1, 5, 0), (2, 5, 0), (1 + 2**32, 5, 0), (1, 6, 0), (1, 5, 1)]
    words = [tuple(token_words(tensors(split_seed(s)), torch.tensor([p]), ids, m).tolist()) for s, p, m in kinds]
    assert len({w for row in words for w in row}) == 64 * len(kinds)


@pytest.mark.parametrize("shift", [0, 8, 16, 24])
@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_each_byte_is_uniform_along_each_coordinate(along, shift):
    n = torch.arange(152_064)
    seeds, positions, tokens = (
        n if along == name else torch.full_like(n, 3) for name in ("seeds", "positions", "tokens")
    )
    words = token_words((seeds, torch.zeros_like(n)), positions, tokens)
    counts = torch.bincount((words >> shift) & 255, minlength=256).tolist()
    assert oracle.chi_square(counts, [len(n) / 256] * 256) < oracle.chi_square_limit(255)


def test_words_of_neighbours_do_not_correlate():
    words = token_words(tensors(split_seed(9)), torch.tensor([9]), torch.arange(152_064)).double().numpy()
    for lag in (1, 2, 3, 4):
        assert abs(np.corrcoef(words[:-lag], words[lag:])[0, 1]) < 4.5 / len(words) ** 0.5


def test_answer_seeds():
    # The first outputs of splitmix64 seeded with 1234567, as published with its reference code.
    first = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    assert tuple(answer_seed(1234567, i) for i in range(4)) == first
    assert len({answer_seed(s, i) for s in (-1, 0, 1, 2**64 - 2) for i in range(128)}) == 4 * 128
    assert answer_seed(-1, 0) == answer_seed(2**64 - 1, 0)
    assert all(0 <= answer_seed(s, 0) < 2**64 for s in (-(2**63), 2**64 - 1))


def test_drawn_seeds_differ():
    seeds = {draw_seed() for _ in range(1000)}
    assert len(seeds) == 1000 and all(0 <= s < 2**64 for s in seeds)
