"""The same bits on an accelerator."""

import pytest
import torch

from kvasir.sampling.sampler import sample
from tests.sampling.test_sampler import REAL, context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("vocab", [32_000, 50_257, 151_936])
def test_an_accelerator_gives_the_cpu_s_bits(vocab):
    rows = [context(spec, range(40), 30, vocab=vocab) for spec in REAL]
    x = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(7)) * 3
    assert sample(x.cuda(), rows) == sample(x, rows)
