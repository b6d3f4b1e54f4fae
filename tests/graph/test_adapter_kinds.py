"""Adapters that change something of every kind on the graph executor: against the eager executor, and a row's bits
alone and beside any others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.engine.core import EngineCore
from kvasir.errors import UnsupportedModel
from kvasir.inputs import Adapter
from kvasir.runner.load import LoadOptions, load_model
from kvasir.types import Request, SamplingParams
from kvasir.weights.find import find_model
from tests.graph.models import folder_of, graph_core
from tests.lora.kinds import everything
from tests.lora.served import adapted_core, log_probabilities
from tests.oracle import plain, same, together

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
IDS = tuple((7 * i * i + 3 * i) % 96 for i in range(1, 20))
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.6}


def small(tmp_path, family: str) -> str:
    return folder_of(tmp_path, family, num_hidden_layers=1)


REFUSED = ("q_norm", "k_norm", "post_norm", ".experts.")


def computed(adapter):
    """What the graph executor computes of an adapter of everything."""

    def kept(changes):
        return {name: change for name, change in changes.items() if not any(part in name for part in REFUSED)}

    return replace(adapter, matrices=kept(adapter.matrices), saved=kept(adapter.saved))


def core_of(folder: str, executor: str, dtype: str = "float32", **options) -> EngineCore:
    model = load_model(find_model(folder), device="cpu", options=LoadOptions("eager")).model
    adapters = {name: computed(everything(model, seed)) for seed, name in enumerate("xyz")}
    defaults = {"num_blocks": 40, "max_num_batched_tokens": 64, "max_num_seqs": 5, "device": "cpu"}
    return adapted_core(folder, executor, adapters, dtype=dtype, **{**defaults, **options})


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama-biased-tied", "float32"), ("gemma2", "bfloat16"), ("qwen3-moe", "float32")],
)
def test_log_probabilities_are_those_of_the_eager_executor(family, dtype, tmp_path):
    folder = small(tmp_path, family)
    eager, graph = (core_of(folder, executor, dtype) for executor in ("eager", "graph"))
    base = log_probabilities(eager, IDS)
    for chosen in ([Adapter("x")], [Adapter("x"), Adapter("y", 1.0, 7)]):
        expected, got = log_probabilities(eager, IDS, *chosen), log_probabilities(graph, IDS, *chosen)
        assert np.nanmax(np.abs(got - expected)) < TOLERANCE[dtype]
        assert np.nanmax(np.abs(got - base)) > 1, "the adapters changed nothing"


def asking(id: str, adapters: Sequence[Adapter] = (), length: int = 13, tokens: int = 3) -> Request:
    params = SamplingParams(max_tokens=tokens, logprobs=1, prompt_logprobs=0, temperature=0.0, ignore_eos=True)
    return Request(id, IDS[:length], params, adapters=tuple(replace(one, content=one.name) for one in adapters))


def test_rows_have_the_same_bits_alone_and_beside_any_adapters(tmp_path):
    folder = small(tmp_path, "llama")
    requests = [
        asking("none"),
        asking("x", [Adapter("x")]),
        asking("several", [Adapter("z"), Adapter("x"), Adapter("y", 1.0, 9)], 15),
        asking("later", [Adapter("y", 1.0, 12)], 16),
    ]
    expected = plain(core_of(folder, "graph", max_num_seqs=1), requests)
    crowd = core_of(folder, "graph", max_num_batched_tokens=29, max_chunk=9, prefix_cache=True)
    same(expected, together(crowd, requests, preempt=0.1))
    assert len({str(answer.logprobs) for answer in expected.values()}) == len(requests)


def test_adapters_come_and_go_without_new_recordings(tmp_path):
    core = core_of(small(tmp_path, "llama"), "graph", max_loras=1)

    def answer(*names: str) -> str:
        [found] = plain(core, [asking("r", [Adapter(name) for name in names], 5, 2)]).values()
        return str((found.tokens, found.logprobs))

    first, none = answer("x"), answer()
    replays = dict(core.runner.executor.replays._recorded)
    other = answer("y")
    assert answer("x") == first and answer() == none and len({first, none, other}) == 3
    assert core.scheduler.adapters.evictions == 2
    assert core.runner.executor.replays._recorded == replays


@pytest.mark.parametrize(
    ("family", "what"), [("qwen3-moe", "experts"), ("qwen3", "k_norm.weight"), ("gemma2", "post_norm.weight")]
)
def test_what_is_not_computed_is_refused_by_name(family, what, tmp_path):
    core = graph_core(small(tmp_path, family))
    with pytest.raises(
        UnsupportedModel, match=rf"{what}\S*', which the graph executor cannot compute.*--executor eager"
    ):
        core.runner.executor.pack_adapter(everything(core.runner.executor.model, 0))
