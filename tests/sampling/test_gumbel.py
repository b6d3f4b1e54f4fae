"""The draw: extreme words, ties, screening that changes nothing, its distribution at a real vocabulary."""

import math

import pytest
import torch

from kvasir.sampling import gumbel
from kvasir.sampling.gumbel import NO_ID, Noise, draw, draw_listed, least, log_exponential, lower_bound
from kvasir.sampling.philox import token_words
from tests.sampling import oracle

VOCAB = 151_936
CPU = torch.device("cpu")


def logits(rows, vocab, scale, seed=0):
    z = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).double() * scale
    return z - z.amax(-1, keepdim=True)


def test_extreme_words_are_finite_and_exact():
    words = [0, 1, 2, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]
    ours = log_exponential(torch.tensor(words))
    for word, value in zip(words, ours.tolist(), strict=True):
        assert math.isfinite(value)
        assert value == pytest.approx(oracle.log_exponential(word), rel=1e-14, abs=1e-15)
    assert ours[0] >= gumbel.LEAST_LOG_E
    assert (ours.diff() > 0).all()


def test_the_lower_bound_is_below():
    words = torch.randint(0, 2**32, (100_000,), generator=torch.Generator().manual_seed(0))
    words = torch.cat([words, torch.tensor([0, 1, 3, 2**32 - 1]), words >> 20, 2 ** torch.arange(32)])
    gap = log_exponential(words) - lower_bound(words)
    assert gap.min() > 0
    assert gap[words < 2**20].max() < 0.1


def test_ties_go_to_the_lower_id():
    rows, ids = torch.tensor([1, 1, 0, 1, 0]), torch.tensor([9, 4, 7, 2, 8])
    scores = torch.tensor([0.5, 0.5, 1.0, 0.75, 1.0], dtype=torch.float64)
    assert least(rows, ids, scores, 3).tolist() == [7, 4, NO_ID]


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 10.0, 1e6])
@pytest.mark.parametrize("vocab", [1, 2, 5, 1003, 8192])
def test_screening_changes_nothing(scale, vocab):
    z = logits(6, vocab, scale)
    z[0, ::3] = -math.inf
    z = z - z.amax(-1, keepdim=True)
    noise = Noise.of(range(6), [2**31 - 1, 0, 1, 2, 3, 4], CPU)
    everything = torch.arange(vocab).expand(6, -1)
    assert torch.equal(draw(z, z.argmax(-1), noise), draw_listed(everything, z, noise))


def test_a_rare_word_wins_from_far_below():
    """Found by search: this seed gives token 5 at position 100 the word 20, e of 4.8e-9."""
    seed, position, token = 111005114, 100, 5
    assert oracle.word(seed, position, token) == 20
    noise = Noise.of([seed], [position], CPU)
    bar = log_exponential(noise.of_tokens(torch.tensor([0]), torch.tensor([0])))
    reach = log_exponential(torch.tensor([20])) - bar  # the z with which token 5 ties with token 0
    assert reach < -18
    for margin, winner in [(1e-6, token), (-1e-6, 0)]:
        z = torch.full((1, 64), -math.inf, dtype=torch.float64)
        z[0, 0], z[0, token] = 0.0, reach + margin
        assert draw(z, torch.tensor([0]), noise).item() == winner


def test_draw_equals_the_oracle():
    z = logits(4, 300, 2.0)
    chosen = draw(z, z.argmax(-1), Noise.of([5, -1, 2**64 - 2, 7], [0, 10, 20, 30], CPU))
    for row, seed, position, ours in zip(z.tolist(), [5, -1, 2**64 - 2, 7], [0, 10, 20, 30], chosen, strict=True):
        scores = [oracle.log_exponential(oracle.word(seed, position, t)) - v for t, v in enumerate(row)]
        assert scores.index(min(scores)) == ours


def test_exponentials_have_the_right_distribution():
    ids = torch.arange(VOCAB)
    zero = torch.zeros_like(ids)
    e = log_exponential(token_words((zero + 1, zero), zero + 2, ids)).double().exp()
    edges = -torch.log1p(-torch.arange(1, 200).double() / 200)
    counts = torch.bincount(torch.bucketize(e, edges), minlength=200).tolist()
    assert oracle.chi_square(counts, [VOCAB / 200] * 200) < oracle.chi_square_limit(199)
    assert abs(e.mean().item() - 1) < 4.5 / VOCAB**0.5


def chi_square_of_draws(z_V, bucket_V, over, num_draws, rows):
    """(chi-square, degrees of freedom) of draws along positions or seeds, counted in buckets of ids."""
    expected = torch.zeros(int(bucket_V.max()) + 1, dtype=torch.float64)
    expected.index_add_(0, bucket_V, torch.softmax(z_V, -1)).mul_(num_draws)
    assert expected.min() > 5
    counts = torch.zeros_like(expected)
    top_R, z_RV = z_V.argmax(-1).expand(rows), z_V.expand(rows, -1)
    for start in range(0, num_draws, rows):
        moving, fixed = range(start, start + rows), [7] * rows
        noise = Noise.of(fixed, moving, CPU) if over == "positions" else Noise.of(moving, fixed, CPU)
        counts += torch.bincount(bucket_V[draw(z_RV, top_R, noise)], minlength=len(counts))
    return oracle.chi_square(counts.tolist(), expected.tolist()), len(counts) - 1


@pytest.mark.slow
def test_distribution_over_a_real_vocabulary():
    """A flat bulk, which no screening thins, in buckets of neighbouring ids; a few likely tokens alone."""
    z = logits(1, VOCAB, 1.5, seed=11)[0]
    z[1000:1008] = torch.linspace(3.3, 4.4, 8).double()
    bucket = torch.arange(VOCAB) // 40_000
    bucket[1000:1008] = bucket.max() + 1 + torch.arange(8)
    value, freedom = chi_square_of_draws(z - z.amax(), bucket, "positions", 200, 1)
    assert value < oracle.chi_square_limit(freedom)


@pytest.mark.few(2)
@pytest.mark.parametrize("over", ["positions", "seeds"])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_distribution_of_many_draws(over, scale):
    z = logits(1, 200, scale, seed=12)[0]
    order = z.argsort(descending=True)
    bucket = torch.empty(200, dtype=torch.int64)
    bucket[order] = torch.clamp(torch.arange(200), max=12)
    value, freedom = chi_square_of_draws(z, bucket, over, 20_000, 500)
    assert value < oracle.chi_square_limit(freedom)
