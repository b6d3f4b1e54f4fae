"""The buckets of relative positions, against transformers' own, over all distances of published models."""

from __future__ import annotations

import pytest

from kvasir.layers.relative import growing_bucket, head_slopes, log_buckets

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("buckets", "farthest"), [(256, 512), (16, 120), (32, 64)])
def test_buckets_of_deberta(buckets, farthest):
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    expected = deberta.make_log_bucket_position(torch.arange(farthest + 1), buckets, farthest).long().tolist()
    assert list(log_buckets(buckets, farthest)) == expected


def test_the_buckets_of_mpnet():
    mpnet = pytest.importorskip("transformers.models.mpnet.modeling_mpnet")
    expected = mpnet.MPNetEncoder.relative_position_bucket(torch.arange(400)).tolist()
    assert [16 + growing_bucket(min(n, 128), 16, 128) for n in range(1, 400)] == expected[1:]
    assert growing_bucket(0, 16, 128) == expected[0] == 0


def test_slopes_are_those_of_the_paper():
    assert head_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert head_slopes(12) == [*head_slopes(8), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert head_slopes(1) == [2.0**-8]
