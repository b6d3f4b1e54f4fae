import time

import pytest
import torch

from kvasir.ops import linear as linear_op
from kvasir.runner.selftest import run
from tests.models.driver import make_cache
from tests.models.families import config_of
from tests.models.oracle import dummy


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_grade_in_no_time(dtype):
    model = dummy(config_of("qwen3"), dtype)
    cache = make_cache(model, dtype=dtype, fill=7.0)
    threads = torch.get_num_threads()
    begun = time.process_time()
    assert run(model, cache) in ("exact", "close")
    assert time.process_time() - begun < 2
    assert torch.get_num_threads() == threads
    assert all((tensor == 7).all() for tensor in cache.tensors), "the model's own cache stays untouched"


def test_rows_that_see_each_other_are_noticed(monkeypatch):
    """A matmul whose rounding depends on how full the tile is, as libraries have them, is not called exact."""
    honest = linear_op._product

    def hasty(x_tk, weight_Nk):
        out = honest(x_tk, weight_Nk)
        return out if bool((x_tk[-1] == 0).all()) else torch.nextafter(out, torch.full_like(out, torch.inf))

    model = dummy(config_of("llama"))
    monkeypatch.setattr(linear_op, "_product", hasty)
    assert run(model, make_cache(model)) == "close"
