"""The graph executor on a GPU: its grade, its bits over buckets, chunks and neighbours, the oracle, and the eager
executor's log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="the extra gpu is not installed")

from tests.gpu.places import DEVICE, DRY, MARKS, capability  # noqa: E402

pytestmark = MARKS
FORMATS = ["BF16", "Q4_K", "F8_BLOCK"]
LENGTH = 10 if DRY else 100
# Chunks of the same sequence, and the tokens of a neighbour beside each chunk: buckets 1, 2, 16, 64, 128 and 512.
CHUNKS = (
    [([4, 1, 5], 0), ([1, 9], 7)]
    if DRY
    else [([100], 0), ([100], 28), ([1, 1, 2, 16, 64, 16], 0), ([1, 2, 61, 36], 15), ([37, 63], 400)]
)


def engine_of(format: str):
    from benchmarks.gpu.engine import Engine
    from benchmarks.gpu.measure import Place
    from benchmarks.gpu.models import config_of, random_model
    from kvasir.ops.compiling import compile_all

    model = random_model(config_of("tiny" if DRY else "0.6B", layers=1 if DRY else 2), format, DEVICE)
    engine = Engine(model, Place(DEVICE), rows=4, length=640, tokens=512)
    compile_all(one for bucket in (1, 32, 64, 128, 256, 512) for one in engine.launches(bucket, 1, 0))
    return engine


@pytest.fixture(scope="module", params=FORMATS[:1] if DRY else FORMATS)
def engine(request):
    made = engine_of(request.param)
    yield made
    made.close()


def hidden(engine, pieces) -> np.ndarray:
    """Hidden states of the last piece, as bits."""

    count = engine.write(pieces)
    with torch.inference_mode():
        engine.executor.replays("rows", count)
        rows = engine.hidden(count)[count - pieces[-1][2] :]
    return rows.cpu().numpy().copy().view(np.uint32)


@pytest.mark.skipif(DRY, reason="the interpreter has no grade")
def test_the_grade_is_exact(engine):
    from kvasir.runner import graph_selftest

    grade = graph_selftest.run(engine.executor)
    print(f"grade on sm_{capability()}: {grade}")
    assert grade != "untested"
    if capability() == 90:
        assert grade == "exact"
    elif grade != "exact":
        pytest.xfail(f"sm_{capability()} computes {grade} bits")


def test_hidden_states_have_the_same_bits_in_any_bucket_and_chunk_and_beside_any_neighbour(engine):
    step = engine.forward.step
    step.ids.random_(0, engine.model.config.vocab_size)
    for table in step.tables:
        blocks = table.shape[1] - 1
        table[:4, :blocks] = torch.arange(1, 1 + 4 * blocks, dtype=torch.int32, device=DEVICE).view(4, blocks)
    step.ids[1] = step.ids[0]
    whole = hidden(engine, [(0, 0, LENGTH)])
    assert np.isfinite(whole.view(np.float32)).all() and len(np.unique(whole)) > LENGTH
    for chunks, neighbour in CHUNKS:
        found, start = [], 0
        assert sum(chunks) == LENGTH
        for count in chunks:
            beside = [(2, 0, neighbour)] if neighbour else []
            found.append(hidden(engine, [*beside, (1, start, count)]))
            start += count
        np.testing.assert_array_equal(np.concatenate(found), whole, f"{chunks} beside {neighbour}")


# -- whole engines over files of tiny families


def folder(tmp_path, family: str, **change) -> str:
    for package in ("safetensors", "ml_dtypes"):
        pytest.importorskip(package, reason=f"{package}, which writes the model's files, is not installed")
    from tests.graph.models import folder_of

    return folder_of(tmp_path, family, **change)


ORACLE = [("qwen3", "bfloat16"), ("gemma2", "float32")]
AGAINST_EAGER = [*ORACLE, ("gemma2", "bfloat16"), ("mistral", "bfloat16"), ("llama-biased-tied", "float32")]


@pytest.mark.parametrize(("family", "dtype"), AGAINST_EAGER[:1] if DRY else AGAINST_EAGER)
def test_prompt_logprobs_are_those_of_the_eager_executor(family, dtype, tmp_path):
    """The eager executor on the CPU, in the same dtype."""
    from tests.engine.cores import core_of
    from tests.graph.models import graph_core
    from tests.graph.test_against_eager import TOLERANCE, prompt_logprobs

    path = folder(tmp_path, family)
    prompt = tuple((7 * i * i + 3 * i) % 96 for i in range(1, 41))
    eager = core_of(path, dtype=dtype, device="cpu", executor="eager", threads=1, block_size=16)
    expected = prompt_logprobs(eager, prompt)
    got = prompt_logprobs(graph_core(path, dtype=dtype, device=DEVICE), prompt)
    assert got.shape == expected.shape == (39, 2)
    (mean, most), error = TOLERANCE[dtype], np.abs(got - expected)
    assert error.mean() < 2 * mean and error.max() < 2 * most


@pytest.mark.skipif(DRY, reason="without a GPU, auto selects a program")
@pytest.mark.parametrize(("family", "executor"), [("qwen3", "graph"), ("qwen3-next", "eager")])
def test_auto_selects_graphs_on_a_gpu_where_they_can_run(family, executor, tmp_path):
    from tests.engine.cores import core_of

    layers = {"num_hidden_layers": 4} if family == "qwen3-next" else {}
    core = core_of(folder(tmp_path, family, **layers))
    assert (core.info.device, core.info.executor) == ("cuda", executor)
    assert any("eager executor: no Triton kernel" in line for line in core.summary) == (executor == "eager")


@pytest.mark.skipif(DRY, reason="tests/graph/test_oracle.py does this in the interpreter")
@pytest.mark.parametrize(("family", "dtype"), ORACLE)
def test_the_oracle(family, dtype, tmp_path):
    """Batches, odd chunks, preemption, cancelled neighbours and NaN in free blocks change no bit."""
    from tests.graph.models import graph_core
    from tests.oracle import free_blocks, mixed_requests, plain, poison, same, together

    path, options = folder(tmp_path, family), {"dtype": dtype, "device": DEVICE, "num_blocks": 200}
    core = graph_core(path, **options, max_num_seqs=1)
    requests = mixed_requests(core.info.vocab_size, 200, count=10)
    expected = plain(core, requests)
    same(expected, together(graph_core(path, **options, max_num_seqs=8), requests))
    crowd = graph_core(path, **options, max_num_seqs=6, max_chunk=13, max_num_batched_tokens=37, overlap=True)
    cancelled = requests[2].id, requests[5].id

    def poisoned(core):
        if not core.scheduler.running:
            poison(core, free_blocks(core))

    got = together(crowd, requests, seed=3, preempt=0.15, cancel=cancelled, each_step=poisoned)
    same(expected, {key: answer for key, answer in got.items() if key[0] not in cancelled}, cancelled)
