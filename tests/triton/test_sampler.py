"""The sampler's kernels give the reference's results in all bits."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")


from kvasir.plan import SamplingSpec
from kvasir.sampling import sampler
from kvasir.sampling.device_state import Logprobs, SamplerState, Workspace, entries, error_text
from kvasir.sampling.rows import Sampled
from kvasir.sampling.triton import sample
from tests.sampling.test_native import KINDS, logits_of
from tests.sampling.test_sampler import context

CPU = "cpu"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, for infinities and NaN


def sampled(x, contexts, tile=128, needs=None, best=8, padding=()):
    """As `sampler.sample`, by the kernels. padding: slots of these numbers have no row."""
    slots, vocab = len(contexts) + len(padding), x.shape[1]
    places = [i for i in range(slots) if i not in padding]
    logits = torch.full((slots, vocab + 3), math.nan)[:, :vocab]
    logits[places] = x
    state = SamplerState(len(contexts) + 2, vocab, CPU)
    work = Workspace(slots, vocab, CPU, best, tile)
    for buffer in vars(work).values():
        if isinstance(buffer, torch.Tensor):
            buffer.fill_(-7)
    rows, known = torch.full((slots,), -1, dtype=torch.int32), torch.full((slots,), -99, dtype=torch.int32)
    ids = torch.full((len(contexts) + 3, max([len(c.ids) for c in contexts], default=0) + 4), -5, dtype=torch.int32)
    mask_S, masks = torch.full((slots,), -1, dtype=torch.int32), []
    for n, (place, one) in enumerate(zip(places, contexts, strict=True)):
        row = len(contexts) - n  # rows in another order than slots
        state.enter(row, one.spec, one.prompt_len)
        rows[place], known[place] = row, len(one.ids)
        ids[row, : len(one.ids)] = torch.from_numpy(np.ascontiguousarray(one.ids))
        if one.mask is not None:
            mask_S[place] = len(masks)
            masks.append(one.mask)
    before = ids.clone()
    tokens, errors = torch.full((2, slots), -9, dtype=torch.int32)
    found = Logprobs(slots, CPU, best)
    needs = needs or state.needs([r for r in rows.tolist() if r >= 0])
    words = max(map(len, masks), default=0)
    stacked = torch.from_numpy(np.stack([np.pad(m, (0, words - len(m))) for m in masks])) if masks else None
    sample(
        *(logits, rows, known, ids, state, work, tokens, errors),
        needs=needs,
        masks=stacked,
        mask_S=mask_S if masks else None,
        logprobs=found,
    )
    for place in padding:
        assert (tokens[place], errors[place]) == (-1, 0)
    for place, one in zip(places, contexts, strict=True):
        if not errors[place]:
            before[rows[place], len(one.ids)] = tokens[place]
    assert torch.equal(ids, before)
    asked = torch.full((slots,), -1)
    asked[places] = torch.tensor([c.spec.logprobs for c in contexts])
    results = entries(
        *(t.tolist() for t in (tokens, found.logprobs_S, found.ranks_S, found.best_ids_SK, found.best_logprobs_SK)),
        asked.tolist(),
        vocab,
    )
    return [
        Sampled(int(tokens[p]), results[p], one.carry, error_text(int(errors[p]), one.spec, vocab))
        for p, one in zip(places, contexts, strict=True)
    ]


def same(x, contexts, **how):
    """By repr, which tells -0.0 from 0.0."""
    assert repr(sampled(x, contexts, **how)) == repr(sampler.sample(x, contexts))


def logits(kind, vocab, rows):
    return torch.from_numpy(np.stack([logits_of(kind, vocab, seed) for seed in range(rows)]))


ROWS = [
    SamplingSpec(),
    SamplingSpec(temperature=1.0, seed=5),
    SamplingSpec(temperature=0.1, seed=-1, min_p=0.1),
    SamplingSpec(temperature=100.0, seed=2**63 + 9),
    SamplingSpec(temperature=1e-6, min_p=1.0, seed=1),
    SamplingSpec(temperature=1.0, min_p=1.0, seed=1),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab", "tile"), [(97, 128), (515, 128), (1000, 1024)])
def test_greedy_and_drawn_tokens(kind, vocab, tile):
    contexts = [context(spec, range(i + 1), vocab=vocab) for i, spec in enumerate(ROWS)]
    same(logits(kind, vocab, len(contexts)), contexts, tile=tile, padding=(0, 3))
