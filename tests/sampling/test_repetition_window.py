"""repetition_last_n and occurrence_last_n: penalties look at the last ids alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import InvalidRequest
from kvasir.plan import SamplingSpec
from kvasir.sampling.processors import process_
from kvasir.types import SamplingParams

VOCAB = 11
IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


def processed(ids: list[int], prompt_len: int = 1, **fields) -> list[float]:
    row = torch.linspace(-3, 3, VOCAB)
    fields = fields or {"repetition_penalty": 1.7}
    process_(row, SamplingSpec(**fields), np.array(ids, np.int32), prompt_len, None)
    return row.tolist()


@given(IDS, st.integers(0, 50))
def test_a_windowed_penalty_is_that_of_a_shorter_text(ids, count):
    shorter = processed(ids[-count:]) if count else torch.linspace(-3, 3, VOCAB).tolist()
    on = {"repetition_penalty": 1.7}
    assert processed(ids, **on, repetition_last_n=count) == shorter
    whole = processed(ids, **on, repetition_last_n=len(ids))
    assert processed(ids, **on, repetition_last_n=-1) == whole == processed(ids)


@given(IDS, st.integers(1, 50), st.integers(0, 40))
def test_occurrences_are_those_among_the_last_ids_wherever_the_answer_begins(ids, count, prompt_len):
    on = {"presence_penalty": 0.7, "frequency_penalty": 0.3}
    output = processed(ids[-count:], 0, **on)
    assert processed(ids, min(prompt_len, len(ids)), **on, occurrence_last_n=count) == output
    whole = processed(ids, 0, **on)
    assert processed(ids, min(prompt_len, len(ids)), **on, occurrence_last_n=-1) == whole
    assert processed(ids, len(ids), **on) == torch.linspace(-3, 3, VOCAB).tolist(), "without one: the answer's alone"


@pytest.mark.parametrize("name", ["repetition_last_n", "occurrence_last_n"])
def test_an_invalid_window_is_refused(name):
    for wrong in (-2, 2**31, 1.5, True):
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: wrong})
