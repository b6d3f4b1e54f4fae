import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvasir.ops import native
from kvasir.runner.eager_selftest import run
from kvasir.runner.selftest import run_program
from tests.engine.cores import random_model
from tests.models.driver import make_cache
from tests.models.families import config_of
from tests.models.oracle import dummy
from tests.runner.made import small_core


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
    honest = F.linear

    def hasty(x_tk, weight_Nk):
        out = honest(x_tk, weight_Nk)
        return out if bool((x_tk[-1] == 0).all()) else torch.nextafter(out, torch.full_like(out, torch.inf))

    model = dummy(config_of("llama"))
    monkeypatch.setattr(F, "linear", hasty)
    assert run(model, make_cache(model)) == "close"


@pytest.mark.skipif(not native.available(), reason=native.reason())
@pytest.mark.parametrize(
    ("options", "grade"),
    [({}, "exact"), ({"max_num_seqs": 1}, "untested"), ({"num_blocks": 4}, "untested"), ({"num_blocks": 5}, "exact")],
)
def test_the_grade_of_a_small_program_is_in_the_summary(options, grade, tmp_path):
    core = small_core(random_model("llama", tmp_path), "program", **{"max_model_len": 32, **options})
    assert core.info.grade == grade
    assert any(f", {grade}, numerics {core.info.numerics[:16]}" in line for line in core.summary)


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_a_program_whose_rows_see_each_other_is_noticed(tmp_path, monkeypatch):
    core = small_core(random_model("llama", tmp_path), "program")
    program = core.runner.executor.program
    run, hidden, pieces = program.run, program.hidden, []

    def hasty(count):
        rows = hidden(count)
        return rows if pieces[-1] == 1 else np.nextafter(rows, np.float32(np.inf))

    assert run_program(program) == "exact"
    monkeypatch.setattr(program, "run", lambda count, longest: pieces.append(count) or run(count, longest))
    monkeypatch.setattr(program, "hidden", hasty)
    assert run_program(program) == "close"
