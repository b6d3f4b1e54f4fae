"""Log-probabilities, ranks and best tokens against exact sums and Python's sort."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvasir.sampling import logprobs as room
from kvasir.sampling.logprobs import logprobs
from kvasir.sampling.rows import BadLogits
from tests.sampling import oracle

VALUES = st.floats(-40, 40, width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0, -math.inf])
LOGITS = st.lists(VALUES, min_size=1, max_size=80)


def agree(ours, theirs):
    token, logprob, rank, best = ours
    assert (token, rank, [t for t, _ in best]) == (theirs[0], theirs[2], [t for t, _ in theirs[3]])
    for a, b in [(logprob, theirs[1]), *zip((v for _, v in best), (v for _, v in theirs[3]), strict=True)]:
        assert a == np.float32(a)
        assert a == b or math.isclose(a, b, rel_tol=1.2e-7, abs_tol=1e-9)


@given(LOGITS, st.data())
def test_entries_equal_the_oracle(row, data):
    assume(max(row) > -math.inf)
    token = data.draw(st.integers(0, len(row) - 1))
    k = data.draw(st.integers(0, len(row)))
    agree(logprobs(torch.tensor([row]), [token], [k])[0], oracle.entry(row, token, k))


@pytest.mark.slow
def test_a_real_vocabulary():
    x = torch.randn(3, 152_064, generator=torch.Generator().manual_seed(0)) * 3
    for row, ours in zip(x.tolist(), logprobs(x, [0, 77, 152_063], [0, 5, 128]), strict=True):
        agree(ours, oracle.entry(row, ours[0], len(ours[3])))
    torch.testing.assert_close(
        torch.tensor([e[1] for e in logprobs(x, [5, 6, 7], [0] * 3)]),
        torch.log_softmax(x, -1)[[0, 1, 2], [5, 6, 7]],
        rtol=1e-6,
        atol=2e-6,
    )


def test_ranks_and_ties():
    row = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0]])
    assert [logprobs(row, [t], [0])[0][2] for t in range(5)] == [3, 1, 4, 2, 5]
    assert [t for t, _ in logprobs(row, [0], [9])[0][3]] == [1, 3, 0, 2, 4]


def test_more_than_the_vocabulary_gives_all_of_it_and_k_does_not_change_a_bit():
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    most = logprobs(x, [3, 4], [99, 99])
    assert [len(e[3]) for e in most] == [50, 50]
    for k in (0, 1, 7):
        for few, many in zip(logprobs(x, [3, 4], [k, 9]), most, strict=True):
            assert few[:3] == many[:3] and few[3] == many[3][: len(few[3])]
    assert dict(most[0][3])[3] == most[0][1]


def test_infinities():
    inf = math.inf
    token, logprob, rank, best = logprobs(torch.tensor([[0.0, inf, -inf, inf]]), [3], [4])[0]
    half = float(np.float32(math.log(0.5)))
    assert (token, logprob, rank) == (3, half, 2)
    assert best == ((1, half), (3, half), (0, -inf), (2, -inf))
    assert logprobs(torch.tensor([[0.0, -inf]]), [1], [0])[0][1:3] == (-inf, 2)


def test_rows_without_meaning_and_ids_outside_are_refused():
    with pytest.raises(BadLogits, match="NaN"):
        logprobs(torch.tensor([[0.0, 1.0], [0.0, math.nan]]), [0, 0], [1, 1])
    with pytest.raises(BadLogits, match="-inf"):
        logprobs(torch.full((1, 5), -math.inf), [0], [0])
    for token in (-1, 2):
        with pytest.raises(ValueError, match="vocabulary of 2"):
            logprobs(torch.zeros(1, 2), [token], [0])
    with pytest.raises(ValueError, match="2 rows"):
        logprobs(torch.zeros(2, 2), [0], [0])
    assert logprobs(torch.zeros(0, 5), [], []) == []


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_other_rows_and_threads_change_no_bit(rows, monkeypatch):
    x = torch.randn(9, 50_257, generator=torch.Generator().manual_seed(2)) * 4
    tokens, best = list(range(9)), [0, 5, 20, 1, 0, 3, 0, 0, 128]
    alone = [logprobs(x[i : i + 1].clone(), [tokens[i]], [best[i]])[0] for i in range(9)]
    monkeypatch.setattr(room, "CPU_ROWS", rows)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert logprobs(x, tokens, best) == alone
