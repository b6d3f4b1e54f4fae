"""The graph executor's own decisions: what it refuses, its buckets, and which rows the host samples."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the extra gpu is not installed")

from kvasir.errors import ConfigError
from kvasir.graph import fold
from kvasir.ops.launch import recording
from kvasir.runner.graph_executor import GraphExecutor
from kvasir.runner.graph_replays import bucket_of, buckets
from kvasir.runner.load import LoadOptions, load_model
from kvasir.runner.runner import Runner
from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.graph.models import folder_of, graph_core
from tests.models.families import FAMILIES
from tests.oracle import Answer, plain, same
from tests.runner.made import files_of


def test_a_model_is_refused_by_the_name_of_an_op_without_a_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(fold, "SINGLE", tuple(op for op in fold.SINGLE if op != "softcap"))
    with pytest.raises(ConfigError, match="the graph executor cannot run this: no Triton kernel for softcap"):
        graph_core(folder_of(tmp_path, "gemma2"))


def test_scores_by_relative_position_are_refused(tmp_path):
    folder = random_model("mpnet", tmp_path)
    with pytest.raises(ConfigError, match="attention by relative position has no Triton kernel"):
        graph_core(folder)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("lfm2", "no Triton kernel for short_conv"),
        ("rwkv7", "no Triton kernel for token_shift"),
        ("deepseek-v2", "no kernel for latent attention"),
        ("glm-moe-dsa", "no kernel for latent attention"),
        ("mimo-v2-flash", "no kernel for keys of 24 and values of 16"),
    ],
)
def test_a_mechanism_without_a_kernel_is_refused_by_name(tmp_path, family, reason):
    folder = random_model(family, tmp_path)
    with pytest.raises(ConfigError, match=f"the graph executor cannot run this: {reason}"):
        graph_core(folder)


def test_a_model_with_an_op_that_has_no_kernel_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot run this: no Triton kernel for delta_gates"):
        graph_core(folder_of(tmp_path, "qwen3-next", num_hidden_layers=4))


@pytest.mark.parametrize(
    "family",
    ["gemma3n", "gemma4", "nemotron-h", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES))],
)
def test_every_family_is_loaded_or_refused(tmp_path, family):
    """On a GPU, a refusal lets `auto` go on with the eager executor; any other error would not."""
    files = files_of(tmp_path, family)
    try:
        loaded = load_model(files, "float32", options=LoadOptions("graph", block_size=16))
    except ConfigError as error:
        assert "kernel" in str(error) or "the forward uses" in str(error)
    else:
        assert loaded.executor == "graph" and loaded.trace is not None


def test_without_a_gpu_and_without_the_interpreter_it_is_refused(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "llama")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="need a GPU"):
        graph_core(folder)


def test_options_that_it_lacks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the graph executor cannot run this: .*quantize"):
        graph_core(folder_of(tmp_path, "llama"), quantize="q8")


@pytest.mark.parametrize("executor", ["auto", "program", "eager"])
def test_an_fp8_cache_is_refused_by_the_other_executors(tmp_path, executor):
    with pytest.raises(ConfigError, match="only the graph executor has an fp8 KV cache") as found:
        core_of(folder_of(tmp_path, "llama"), executor=executor, kv_dtype="fp8")
    assert "--executor graph" in str(found.value.hint)


def test_buckets_cover_every_number_of_rows():
    assert buckets(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert all(bucket_of(n, 100) == min(b for b in buckets(100) if b >= n) for n in range(1, 101))


@pytest.mark.slow
def test_a_decoding_step_makes_the_launches_of_its_buckets(tmp_path):
    core = graph_core(folder_of(tmp_path, "llama"))
    core.add(Request("r", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=4, seed=0, ignore_eos=True)))
    assert isinstance(core.runner, Runner)
    executor = core.runner.executor
    assert isinstance(executor, GraphExecutor)
    counted: list[int] = []
    compute = executor.compute

    def counting(step):
        with recording() as launches:
            found = compute(step)
        counted.append(len(launches))
        assert executor.sampler and len(executor.sampler.unread) <= 2, "draws that were read long ago are kept"
        return found

    executor.compute = counting
    while core.has_work():
        for delta in core.step():
            assert delta.error is None, delta.error
    # expand, plan, embedding, norm; eight per layer; chosen rows and logits; the best id
    assert [count for count in counted if count] == [4 + 2 * 8 + 2 + 2] * 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_row_that_the_host_samples_changes_no_other(tmp_path):
    folder = folder_of(tmp_path, "llama")
    asked = [
        Request("here", (3, 4, 5), SamplingParams(temperature=0.9, typical_p=0.6, max_tokens=5, seed=1, logprobs=1)),
        Request("there", (9, 8), SamplingParams(temperature=0.9, top_p=0.8, max_tokens=5, seed=2, logprobs=1)),
        Request("dry", (9, 8, 9, 8), SamplingParams(temperature=0.0, dry_multiplier=2.0, max_tokens=5, seed=2)),
    ]
    expected = plain(graph_core(folder, max_num_seqs=1), asked)
    core, answers = graph_core(folder), {(request.id, 0): Answer() for request in asked}
    for request in asked:
        core.add(request)
    while core.has_work():
        for delta in core.step():
            answers[delta.id, delta.index].take(delta)
    same(expected, answers)
