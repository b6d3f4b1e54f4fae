"""Quantized models on the program executor: their logits against those of the same weights, decoded, in float32.

Both sides have the file's weights bit for bit. Programs round the rows that meet them to int8 besides, and that
rounding is all that these bounds allow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf", reason="gguf writes the files of these tests")

from kvasir.errors import ConfigError  # noqa: E402
from kvasir.ops import native as door  # noqa: E402
from kvasir.ops.linear.native import FORMATS  # noqa: E402
from kvasir.ops.linear.packed import PackedMatrix, PackingError, error_of  # noqa: E402
from kvasir.runner.load import LoadedModel, LoadOptions, load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests._shared import need  # noqa: E402
from tests.models import driver  # noqa: E402
from tests.models.driver import logits_of  # noqa: E402
from tests.program.made import Driver, program_of  # noqa: E402
from tests.program.mini import FOLDER, ids_of, write_mini  # noqa: E402

pytestmark = pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}")


class Error(NamedTuple):
    """rms: of the difference of logits, relative to the rms of logits. logprob: mean change of the log-probability of
    the tokens that follow."""

    rms: float
    logprob: float


# In all of these the bounds lie just above what was measured. Nibbles in a wrong order in one matrix of the 28 give an
# rms of 0.3 and more, wrong upper bits of levels 0.15, wrong lower bits of half its sub-scales 0.06.
EXACT = dict.fromkeys(("F32", "F16", "BF16"), Error(1e-6, 3e-6))  # two orders of summation
# int8 rows with a scale per 32 weights
BY_32 = {
    "Q8_0": Error(0.011, 0.015),
    "Q4_0": Error(0.011, 0.015),
    "Q4_1": Error(0.011, 0.015),
    "Q5_0": Error(0.011, 0.015),
    "Q5_1": Error(0.011, 0.015),
    "IQ4_NL": Error(0.012, 0.015),
    "MXFP4": Error(0.011, 0.015),
}
# and per 256. Two or three levels of weight make a poor model, which is why it moves more; they agree all the same.
BY_256 = {
    "Q2_K": Error(0.022, 0.04),
    "Q3_K": Error(0.02, 0.025),
    "Q4_K": Error(0.02, 0.025),
    "Q5_K": Error(0.02, 0.025),
    "Q6_K": Error(0.02, 0.025),
    "IQ4_XS": Error(0.02, 0.025),
    "TQ1_0": Error(0.055, 0.17),
    "TQ2_0": Error(0.055, 0.17),
}
# Rounded to Q8_0 besides.
OTHERS = {"Q1_0": Error(0.025, 0.04)}
BOUNDS = EXACT | BY_32 | BY_256 | OTHERS
PAGE = Path(__file__).parents[2] / "docs" / "quantization.md"
PACKED = {"TQ1_0": "TERNARY", "TQ2_0": "TERNARY", "Q1_0": "Q8_0"}


def program(path, dtype: str = "float32", **wish) -> LoadedModel:
    return load_model(find_model(str(path)), dtype, options=LoadOptions("program", **wish))


def eager_logits(path, ids: list[int], dtype: str = "float32") -> np.ndarray:
    return logits_of(load_model(find_model(str(path)), dtype).model, ids).numpy()


def logprobs(logits: np.ndarray) -> np.ndarray:
    """float64 [..., V]"""
    return torch.from_numpy(logits).double().log_softmax(-1).numpy()


def error(found: np.ndarray, expected: np.ndarray, ids: list[int]) -> Error:
    rms = np.sqrt(np.square(found - expected).mean() / np.square(expected).mean())
    moved = (logprobs(found) - logprobs(expected))[np.arange(len(ids) - 1), ids[1:]]
    return Error(float(rms), float(np.abs(moved).mean()))


def assert_within(found: Error, bound: Error) -> None:
    assert found.rms < bound.rms and found.logprob < bound.logprob, found


# --- every type of weight, of a model that was trained ----------------------------------------------


@pytest.fixture(scope="module", params=BOUNDS)
def case(request, tmp_path_factory):
    path = write_mini(tmp_path_factory.mktemp("mini") / f"{request.param}.gguf", request.param)
    model = program(path)
    return request.param, path, model, Driver(program_of(model), ids_of()).logits(0, len(ids_of()))


@pytest.mark.few(8)
def test_logits_are_those_of_the_decoded_weights(case):
    kind, path, model, found = case
    assert set(model.formats) == {PACKED.get(kind, kind)}
    assert any(kind in note for note in model.notes) == (kind in OTHERS)
    assert_within(error(found, eager_logits(path, ids_of()), ids_of()), BOUNDS[kind])


def test_the_same_bits_in_pieces_and_on_two_threads(case):
    _, _, model, expected = case
    driven, parts, start = Driver(program_of(model, threads=2, fill=np.nan, block_size=32), ids_of()), [], 0
    for count in (1, 2, 17, 9, 1, 32, len(ids_of()) - 62):
        parts.append(driven.logits(start, count))
        start += count
    assert np.array_equal(np.concatenate(parts).view(np.uint32), expected.view(np.uint32))


@pytest.mark.few(12)
@pytest.mark.parametrize("isa", door.ISAS[:-1])
def test_the_same_bits_on_lesser_instruction_sets(case, isa):
    _, _, model, expected = case
    try:
        door.force_isa(isa)
    except ConfigError as reason:
        pytest.skip(str(reason))
    try:
        found = Driver(program_of(model), ids_of()).logits(0, 21)
    finally:
        door.force_isa(None)
    assert np.array_equal(found.view(np.uint32), expected[:21].view(np.uint32))


@pytest.mark.parametrize("format", FORMATS)
def test_the_page_has_the_bits_of_every_format(format):
    rows = [[cell.strip() for cell in line.split("|")] for line in PAGE.read_text().splitlines()]
    (bits,) = {row[2] for row in rows if len(row) == 7 and row[1].split()[:1] == [format]}
    packed = PackedMatrix(format, 1024, 4096, 1)
    assert float(bits) == packed.nbytes * 8 / (1024 * 4096)


# --- quantize ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_bf16():
    return Driver(program_of(program(FOLDER, "bfloat16")), ids_of()).logits(0, len(ids_of()))


def test_bfloat16_is_near_float32(in_bf16):
    assert_within(error(in_bf16, eager_logits(FOLDER, ids_of()), ids_of()), Error(0.003, 0.003))


# Against the same model in bfloat16; then the differences of weights from before, relative to their rms.
@pytest.mark.parametrize(
    ("quantize", "bound", "layers", "table"),
    [
        ("q8", Error(0.015, 0.02), PackingError(0.09, 0.0055), PackingError(0.035, 0.0055)),
        ("q4", Error(0.11, 0.11), PackingError(1.4, 0.085), PackingError(0.035, 0.0055)),
    ],
)
def test_quantizing_while_loading(in_bf16, quantize, bound, layers, table):
    reported: dict[str, tuple[PackedMatrix, PackingError]] = {}

    def report(name: str, packed: PackedMatrix, before: np.ndarray) -> None:
        assert name not in reported
        reported[name] = packed, error_of(packed, before)

    options = LoadOptions("program", quantize=quantize)
    model = load_model(find_model(str(FOLDER)), "bfloat16", options=options, report=report)
    assert len(reported) == 4 * 7 + 1  # the head is the table
    for name, (packed, moved) in reported.items():
        is_table = name == "model.embed_tokens.weight"
        assert packed.format == ("Q8_0" if is_table or quantize == "q8" else "Q4_0")
        most = table if is_table else layers
        assert 0 < moved.mean < most.mean and moved.max < most.max, (name, moved)
    assert sum(packed.nbytes for packed, _ in reported.values()) == sum(model.formats.values())
    found = Driver(program_of(model), ids_of()).logits(0, len(ids_of()))
    assert_within(error(found, in_bf16, ids_of()), bound)


def test_tensors_quantized_in_the_file_keep_their_format(tmp_path):
    path, reported = write_mini(tmp_path / "model.gguf", "Q6_K"), []
    options = LoadOptions("program", quantize="q4")
    model = load_model(find_model(str(path)), options=options, report=lambda *args: reported.append(args))
    assert set(model.formats) == {"Q6_K"} and not reported
    with pytest.raises(ConfigError, match="quantize is 'q3'"):
        program(path, quantize="q3")


# --- files of others --------------------------------------------------------------------------------


def expected_of(name: str) -> list[dict]:
    return json.loads(need("models", name, "expected.json").read_text())["cases"]


@pytest.mark.parametrize(
    ("file", "bound"),
    [
        ("TinyStories-656K-BF16", Error(1e-6, 3e-6)),
        ("TinyStories-656K-F16", Error(1e-6, 3e-6)),
        ("TinyStories-656K-Q8_0", Error(0.013, 0.02)),
        ("TinyStories-656K-Q4_0", Error(0.013, 0.02)),
    ],
)
def test_files_of_llama_cpp(file, bound):
    path = need("models", "gguf", f"{file}.gguf")
    model = program(path)
    for case in expected_of("TinyStories-656K"):
        ids = case["prompt_ids"] + case["greedy_ids"]
        found = Driver(program_of(model), ids).logits(0, len(ids))
        assert_within(error(found, eager_logits(path, ids), ids), bound)


def test_embeddings_of_a_k_quantized_bert():
    path = need("models", "gguf", "all-MiniLM-L6-v2-Q4_K_M.gguf")
    cases = json.loads(need("models", "all-MiniLM-L6-v2", "expected_embeddings.json").read_text())["cases"]
    eager, model = load_model(find_model(str(path)), "float32").model, program(path)
    assert {"Q5_0", "Q8_0", "Q4_K", "Q6_K"} <= set(model.formats)
    cache = driver.make_cache(eager, blocks=8)
    for ids in (case["ids"] for case in cases):
        (rows,) = driver.step(eager, cache, [(ids, 0, driver.table(1, 2))], causal=False)
        hidden = Driver(program_of(model), ids).hidden(0, len(ids), bidirectional=True)
        a, b = model.model.pool(hidden), eager.pool(rows.numpy())
        assert a @ b / np.sqrt((a @ a) * (b @ b)) > 0.999


def test_greedy_tokens_of_stories260k():
    model = program(need("models", "stories260K"))
    for case in expected_of("stories260K"):
        ids, count = case["prompt_ids"], len(case["greedy_ids"])
        driven, start = Driver(program_of(model), ids), 0
        for known in range(len(ids), len(ids) + count):
            driven.ids[known] = driven.logits(start, known - start)[-1].argmax()
            start = known
        assert driven.ids[len(ids) : len(ids) + count].tolist() == case["greedy_ids"]


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.12)])
def test_logprobs_of_stories260k(dtype, bound):
    """bound: of the five best log-probabilities before each token, given to 5 places."""
    model = program(need("models", "stories260K"), dtype)
    for case in expected_of("stories260K"):
        ids = case["prompt_ids"] + case["greedy_ids"]
        rows = logprobs(Driver(program_of(model), ids).logits(0, len(ids)))[len(case["prompt_ids"]) - 1 :]
        best = np.array(case["top5_logprobs"])
        found = np.take_along_axis(rows[: len(best)], best[..., 0].astype(int), 1)
        assert np.abs(found - best[..., 1]).max() < bound
