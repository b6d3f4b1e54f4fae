"""The oracle on ranks: an engine whose program is shared, against the plain answers of the whole one."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.cores import core_of, random_model
from tests.oracle import mixed_requests, plain, same, together

pytest.importorskip("torch")

from kvasir.engine.core import EngineCore
from kvasir.parallel.local import LocalRanks
from kvasir.program.cache import NativeCache
from kvasir.program.program import Program
from kvasir.program.ranks import RankedProgram
from kvasir.runner.load import LoadOptions, load_model
from kvasir.weights.find import find_model

FAST = [("llama", 2, "bfloat16"), ("qwen3-moe", 4, "float32")]
KINDS = ("mini", "llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3", "phi3", "mixtral", "qwen3-moe")
SLOW = [(kind, size, "bfloat16") for kind in KINDS for size in (2, 8)]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case not in FAST)]


def share(core: EngineCore, folder: str, size: int, dtype: str) -> RankedProgram:
    """Puts the programs of so many ranks in the place of the core's."""
    executor, capacity, ranks = core.runner.executor, core.runner.capacity, LocalRanks(size)
    old, files = executor.program, find_model(folder)

    def part(mesh) -> Program:
        loaded = load_model(files, dtype, options=LoadOptions("program", mesh=mesh))
        cache = NativeCache(loaded.model.cache_spec(), old.cache.num_blocks, old.cache.block_size, old.cache.kv_dtype)
        return Program(
            loaded.trace, cache, max_tokens=capacity.max_tokens_per_step, max_rows=capacity.max_rows,
            max_positions=capacity.max_model_len + 1, threads=1, max_drafted=capacity.max_drafted,
        )  # fmt: skip

    executor.program = RankedProgram(ranks, [part(mesh) for mesh in ranks.meshes])
    executor.bind(core.runner.rows)
    old.close()
    return executor.program


@pytest.mark.parametrize(("kind", "size", "dtype"), CASES)
def test_batched_answers_of_ranks_equal_those_of_one_rank(tmp_path, kind, size, dtype):
    folder = "kvasir-mini" if kind == "mini" else random_model(kind, tmp_path)
    options = {"dtype": dtype, "executor": "program", "threads": 1}
    core = core_of(folder, **options, max_num_seqs=1, num_blocks=40)
    requests = mixed_requests(core.info.vocab_size, 256, longest=100)
    expected = plain(core, requests)
    core = core_of(folder, **options, block_size=16, num_blocks=60, max_chunk=29, max_num_batched_tokens=61)
    program = share(core, folder, size, dtype)
    program.cache.fill_(np.nan)
    same(expected, together(core, requests, seed=size, preempt=0.2, cancel=("r2",)), leave_out=("r2",))
    assert core.stats().preemptions > 0 and program.seconds > 0
