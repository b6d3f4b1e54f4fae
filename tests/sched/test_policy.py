"""Chunks and gates: what one sequence gets in a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.sched import policy
from kvasir.sched.policy import AdmitFacts, OwnFacts, chunk_tokens

FREE = AdmitFacts(1, 8, 8, False, blocks_fit=True)
READY = OwnFacts(values_known=True)
COUNT = st.integers(0, 300)


@given(COUNT, COUNT, COUNT, st.integers(1, 300), COUNT)
def test_a_chunk_keeps_to_every_bound(pending, budget, decodes, max_chunk, prefill):
    count = chunk_tokens(pending, budget, decodes, max_chunk, False, prefill)
    assert 0 <= count <= min(pending, budget, max_chunk)
    if pending > 1:
        assert count <= prefill
    if count > 1:
        assert count <= budget - decodes, "every decode behind it keeps its token"
    if pending and budget and (prefill or pending == 1):
        assert count, "whoever comes first gets one"


@given(COUNT, COUNT, COUNT, st.integers(1, 300), COUNT)
def test_indivisible_work_is_computed_whole_or_not_at_all(pending, budget, decodes, max_chunk, prefill):
    assert chunk_tokens(pending, budget, decodes, max_chunk, True, prefill) in (0, pending)


def test_a_decode_needs_no_allowance_of_prefills():
    assert chunk_tokens(1, 8, 0, 8, False, prefill=0) == 1
    assert chunk_tokens(2, 8, 0, 8, False, prefill=0) == 0


@pytest.mark.parametrize(
    "change", [{"free_rows": 0}, {"budget": 0}, {"blocks_fit": False}, {"indivisible": True, "budget": 7}]
)
def test_each_shared_gate_shuts_for_its_own_reason(change):
    assert all(gate(FREE) for gate in policy.SHARED_GATES)
    assert sum(not gate(replace(FREE, **change)) for gate in policy.SHARED_GATES) == 1


@pytest.mark.parametrize("change", [{"values_known": False}, {"compiling": True}, {"loading": True}])
def test_each_own_gate_shuts_for_its_own_reason(change):
    assert all(gate(READY) for gate in policy.OWN_GATES)
    assert sum(not gate(replace(READY, **change)) for gate in policy.OWN_GATES) == 1
