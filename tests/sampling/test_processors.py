"""Each processor against the slow oracle, bit for bit, and against transformers where it has the same one."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.plan import SamplingSpec
from kvasir.sampling.processors import changes_logits, process_
from tests.examples import examples
from tests.sampling import oracle

VOCAB = 70
INF = math.inf
TOKENS = st.integers(0, VOCAB - 1)
LOGITS = st.lists(
    st.floats(-30, 30, width=32) | st.sampled_from([0.0, -0.0, INF, -INF]), min_size=VOCAB, max_size=VOCAB
)
SPECS = st.builds(
    SamplingSpec,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]) | st.floats(-2, 2),
    frequency_penalty=st.sampled_from([0.0, 0.1, -2.0]) | st.floats(-2, 2),
    repetition_penalty=st.sampled_from([1.0, 1.1, 0.5]) | st.floats(0.01, 10),
    logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100), max_size=5).map(lambda d: tuple(d.items())),
    min_tokens=st.integers(0, 10),
    stop_ids=st.lists(TOKENS, max_size=3).map(tuple),
)


def processed(row, spec, ids=(), prompt_len=0, mask=None):
    x = torch.tensor(row, dtype=torch.float32)
    process_(x, spec, np.array(ids, np.int32), prompt_len, mask)
    return x


@examples(80)
@given(LOGITS, SPECS, st.lists(TOKENS, max_size=12), st.integers(0, 12), st.none() | st.sets(TOKENS))
def test_processors_together_equal_the_oracle(row, spec, ids, prompt_len, allowed):
    prompt_len = min(prompt_len, len(ids))
    mask = None if allowed is None else oracle.bitmask(allowed, VOCAB)
    ours = processed(row, spec, ids, prompt_len, mask)
    theirs = oracle.process(row, spec, ids, prompt_len, allowed)
    assert (ours.numpy() == theirs).all()
    if not changes_logits(spec, len(ids) - prompt_len, mask):
        assert (ours.numpy() == np.array(row, np.float32)).all()


def test_each_processor_by_hand():
    row, ids = [1.0, -2.0, 0.5, 3.0], [0, 1, 1, 3]
    assert processed(row, SamplingSpec(repetition_penalty=2.0), ids, 2).tolist() == [0.5, -4.0, 0.5, 1.5]
    assert processed(row, SamplingSpec(presence_penalty=0.5), ids, 2).tolist() == [1.0, -2.5, 0.5, 2.5]
    assert processed(row, SamplingSpec(frequency_penalty=0.5), [*ids, 1], 2).tolist() == [1.0, -3.0, 0.5, 2.5]
    assert processed(row, SamplingSpec(logit_bias=((2, 4.0),)), ids, 2).tolist() == [1.0, -2.0, 4.5, 3.0]
    spec = SamplingSpec(min_tokens=3, stop_ids=(3, 99))
    assert processed(row, spec, ids, 2).tolist() == [1.0, -2.0, 0.5, -INF]
    assert processed(row, spec, [*ids, 0], 2).tolist() == row
    assert processed(row, SamplingSpec(), mask=np.array([0b0101], np.int32)).tolist() == [
        1.0,
        -INF,
        0.5,
        -INF,
    ]


def test_order_bias_before_penalty_and_nothing_raises_the_forbidden():
    spec = SamplingSpec(logit_bias=((0, 3.0), (1, 100.0)), repetition_penalty=2.0, min_tokens=9, stop_ids=(1,))
    assert processed([-1.0, 5.0, 5.0], spec, [0]).tolist() == [1.0, -INF, 5.0]
    assert processed([-1.0, 5.0, 5.0], spec, [0], mask=np.array([0b101], np.int32)).tolist() == [
        1.0,
        -INF,
        5.0,
    ]


def test_masks_of_other_lengths():
    row = [0.0] * 70
    assert processed(row, SamplingSpec(), mask=np.array([-1], np.int32)).isinf().tolist() == [False] * 32 + [True] * 38
    assert processed(row, SamplingSpec(), mask=np.array([-1] * 9, np.int32)).tolist() == row
    words = np.arange(8, dtype=np.int32)[::2]
    assert torch.equal(processed(row, SamplingSpec(), mask=words), processed(row, SamplingSpec(), mask=words.copy()))


def test_ids_without_a_logit_do_not_count_but_a_bias_for_one_is_refused():
    spec = SamplingSpec(repetition_penalty=2.0, frequency_penalty=1.0, stop_ids=(7,), min_tokens=9)
    assert processed([1.0, 1.0], spec, [2, 5, -1]).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"token 2.*vocabulary.* 2"):
        processed([1.0, 1.0], SamplingSpec(logit_bias=((2, 1.0),)))


@pytest.mark.filterwarnings("ignore")
@given(LOGITS, st.lists(TOKENS, min_size=1, max_size=12), st.floats(0.1, 5))
def test_repetition_penalty_is_that_of_transformers(row, ids, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), torch.tensor([row]))[0]
    assert torch.equal(processed(row, SamplingSpec(repetition_penalty=penalty), ids, 1), theirs)
