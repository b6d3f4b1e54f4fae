"""Adapters of every kind on a GPU: the eager executor's log-probabilities, and a row's bits alone and beside others."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="the extra gpu is not installed")

from tests.gpu.places import DEVICE, DRY, MARKS

pytestmark = [*MARKS, pytest.mark.skipif(DRY, reason="tests/graph/test_adapter_kinds.py does this in the interpreter")]
MODELS = [("llama", "float32"), ("llama", "bfloat16"), ("gemma2", "bfloat16"), ("qwen3-moe", "bfloat16")]


def folder(tmp_path, family: str) -> str:
    for package in ("safetensors", "ml_dtypes"):
        pytest.importorskip(package, reason=f"{package}, which writes the model's files, is not installed")
    from tests.graph.models import folder_of

    return folder_of(tmp_path, family)


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_log_probabilities_are_those_of_the_eager_executor(family, dtype, tmp_path):
    import numpy as np

    from kvasir.inputs import Adapter
    from tests.graph.test_adapter_kinds import IDS, TOLERANCE, core_of
    from tests.lora.served import log_probabilities

    path = folder(tmp_path, family)
    eager, graph = core_of(path, "eager", dtype), core_of(path, "graph", dtype, device=DEVICE)
    for chosen in ([], [Adapter("x")], [Adapter("x"), Adapter("y", 1.0, 7)]):
        expected, got = (log_probabilities(core, IDS, *chosen) for core in (eager, graph))
        assert np.nanmax(np.abs(got - expected)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_rows_have_the_same_bits_alone_and_beside_any_adapters(family, dtype, tmp_path):
    from kvasir.inputs import Adapter
    from tests.graph.test_adapter_kinds import core_of
    from tests.oracle import mixed_requests, plain, same, together

    path, options = folder(tmp_path, family), {"device": DEVICE, "dtype": dtype, "num_blocks": 200}
    chosen = [(), (Adapter("x"),), (Adapter("z"), Adapter("x"), Adapter("y", 1.0, 9)), (Adapter("y", 1.0, 12),)]
    core = core_of(path, "graph", max_num_seqs=1, **options)
    requests = [
        replace(request, adapters=tuple(replace(one, content=one.name) for one in chosen[i % 4]))
        for i, request in enumerate(mixed_requests(core.info.vocab_size, 200, count=8))
    ]
    expected = plain(core, requests)
    same(expected, together(core_of(path, "graph", max_num_seqs=8, max_num_batched_tokens=700, **options), requests))
    crowd = core_of(path, "graph", max_num_seqs=6, max_num_batched_tokens=37, max_chunk=13, **options)
    same(expected, together(crowd, requests, preempt=0.1))
