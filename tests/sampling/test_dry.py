"""DRY and bad words against place-by-place definitions; the repetition search is linear."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.plan import SamplingSpec
from kvasir.sampling import dry
from kvasir.sampling.processors import changes_logits, ended_by, process_
from kvasir.sampling.sampler import sample
from tests.examples import examples
from tests.sampling import chain_oracle as oracle
from tests.sampling.oracle import bitmask
from tests.sampling.test_sampler import context

VOCAB = 40
FEW = st.integers(0, 3) | st.integers(0, VOCAB - 1)
IDS = st.lists(st.integers(0, 2), max_size=40) | st.lists(FEW, max_size=40)
SPECS = st.fixed_dictionaries(
    {
        "dry_multiplier": st.sampled_from([0.5, 0.8, 30.0]),
        "dry_base": st.sampled_from([1.0, 1.75, 1000.0]),
        "dry_allowed_length": st.sampled_from([0, 1, 2, 5]),
        "dry_penalty_last_n": st.sampled_from([-1, 1, 7, 64]),
    }
)
ALONE = st.sets(FEW, max_size=2)
SEQUENCES = st.lists(st.lists(FEW, min_size=2, max_size=3).map(tuple), max_size=3).map(tuple)


@examples(200)
@given(IDS, SPECS, ALONE, SEQUENCES)
def test_penalties_are_the_definition_s(ids, fields, alone, sequences):
    mask = bitmask(alone, VOCAB).tobytes() if alone else b""
    spec = SamplingSpec(**fields, dry_breakers=mask, dry_breaker_sequences=sequences)
    found = dry.penalties(np.array(ids, np.int32), spec)
    assert found == pytest.approx(oracle.dry_penalties(ids, spec, alone, sequences), rel=1e-6)
    assert all(math.isfinite(v) and v == np.float32(v) for v in found.values())


@examples(100)
@given(IDS)
def test_repeats_are_the_definition_s(ids):
    assert dry.suffix_repeats(ids) == oracle.repeats(ids)


def test_the_example_of_the_page():
    ids = [0, 1, 2, 2, 1, 2, 3, 0, 1, 2]  # a b c c b c y a b c
    assert dry.suffix_repeats(ids) == [0, 0, 3, 1, 0, 2, 0, 0, 0, 10]
    spec = SamplingSpec(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2, dry_penalty_last_n=-1)
    assert dry.penalties(np.array(ids, np.int32), spec) == {2: 1.0, 3: 0.5}
    x = torch.zeros(VOCAB)
    process_(x, spec, np.array(ids, np.int32), 1, None)
    assert x.nonzero()[:, 0].tolist() == [2, 3] and x[2] == -1.0 and x[3] == -0.5
    assert dry.penalties(np.array([*ids, 7], np.int32), spec) == {}


class Counted(list):
    reads = 0

    def __getitem__(self, index):
        Counted.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["equal", "halves", "fibonacci", "random"])
@pytest.mark.parametrize("length", [100, 10_000])
def test_the_search_reads_no_more_than_a_few_times_each_id(kind, length):
    words = [[0], [1]]
    while len(words[-1]) < length:
        words.append(words[-1] + words[-2])
    rows = {
        "equal": [5] * length,
        "halves": (list(range(length // 2)) * 2)[:length],
        "fibonacci": words[-1][:length],
        "random": np.random.default_rng(0).integers(0, 2, length).tolist(),
    }
    Counted.reads = 0
    dry.suffix_repeats(Counted(rows[kind]))
    assert 0 < Counted.reads <= 4 * length  # two a comparison, of which at most `length` succeed and `length` fail


@pytest.mark.parametrize("off", [{}, {"dry_multiplier": 0.0}, {"dry_multiplier": 2.0, "dry_penalty_last_n": 0}])
def test_dry_that_is_off_changes_nothing(off):
    assert not changes_logits(SamplingSpec(**off), 3, None)


def test_penalised_tokens_stay_possible_and_out_of_range_ids_are_ignored():
    spec = SamplingSpec(dry_multiplier=1000.0, dry_base=1000.0, dry_allowed_length=0, dry_penalty_last_n=-1)
    ids = [0, 99] * 200 + [0]
    result = sample(torch.tensor([[1.0]]), [context(spec, ids, 1, vocab=1)])[0]
    assert (result.error, result.token) == ("", 0)


WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6).map(tuple)


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 8), WORDS)
def test_the_last_id_of_a_bad_word_is_forbidden_after_the_others(ids, prompt_len, words):
    prompt_len = min(prompt_len, len(ids))
    x = torch.arange(6.0)
    process_(x, SamplingSpec(bad_words=words), np.array(ids, np.int32), prompt_len, None)
    output = ids[prompt_len:]
    expected = {t for t in range(6) for word in words if tuple([*output, t])[-len(word) :] == word}
    assert set(torch.nonzero(x == -math.inf)[:, 0].tolist()) == expected
    assert changes_logits(SamplingSpec(bad_words=words), 0, None) == bool(words)


def test_a_bad_word_never_appears_and_its_beginning_may():
    """Each row takes its best token; a word of three ids has the highest logits."""
    spec = SamplingSpec(bad_words=((1, 2, 3), (9,), (77,)))
    ids = [5]
    for favourite in (9, 1, 2, 3, 4):
        x = torch.zeros(1, 12)
        x[0, favourite], x[0, 6] = 2.0, 1.0
        ids.append(sample(x, [context(spec, ids, 1, vocab=12)])[0].token)
    assert ids == [5, 6, 1, 2, 6, 4]
    assert ended_by(np.array([1, 2], np.int32), ((2, 3), (1, 2, 5), (1, 3, 5))) == (3, 5)


def test_a_row_with_all_ids_forbidden_fails():
    result = sample(torch.zeros(1, 2), [context(SamplingSpec(bad_words=((0,), (1,))), vocab=2)])[0]
    assert result.token == -1 and "bad_words" in result.error
