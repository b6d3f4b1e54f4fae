"""repetition_last_n: the penalty looks at the last ids alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.plan import SamplingSpec
from kvasir.sampling.native import covers
from kvasir.sampling.processors import process_
from kvasir.types import SamplingParams

VOCAB = 11
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


def processed(ids: list[int], prompt_len: int = 1, **fields) -> list[float]:
    row = torch.linspace(-3, 3, VOCAB)
    process_(row, SamplingSpec(repetition_penalty=1.7, **fields), np.array(ids, np.int32), prompt_len, None)
    return row.tolist()


@given(IDS, st.integers(0, 50))
def test_it_is_the_penalty_of_a_shorter_text(ids, count):
    shorter = processed(ids[-count:]) if count else torch.linspace(-3, 3, VOCAB).tolist()
    assert processed(ids, repetition_last_n=count) == shorter
    assert processed(ids, repetition_last_n=-1) == processed(ids, repetition_last_n=len(ids)) == processed(ids)


def test_the_reference_serves_it():
    assert covers(SamplingSpec(repetition_penalty=1.7)) and not covers(SamplingSpec(repetition_last_n=5))
    for wrong in (-2, 2**31, 1.5, True):
        with pytest.raises(InvalidRequest, match="repetition_last_n"):
            SamplingParams(repetition_last_n=wrong)
