"""Every format of weights in parts: sums of a matrix's columns, and whole models from GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf", reason="gguf writes the files of these tests")

from kvasir.ops import native as door  # noqa: E402
from kvasir.ops.linear import native  # noqa: E402
from kvasir.ops.linear.packed import num_segments, pack_rows, take_columns  # noqa: E402
from kvasir.parallel import cut, tree_sum  # noqa: E402
from tests.program.made import Driver, bits, program_of  # noqa: E402
from tests.program.mini import write_llama, write_mini  # noqa: E402
from tests.program.ranked import parts_of, ranked  # noqa: E402
from tests.program.test_quantized import BOUNDS, program  # noqa: E402
from tests.program.test_ranks import check  # noqa: E402
from tests.quant.kquants import quantize  # noqa: E402

pytestmark = pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}")

KINDS = tuple(BOUNDS)
FLOATS = ("F32", "F16", "BF16")
# Sums of 2048 have eight segments in every format; sums of 256 have one if a group is 256.
CONFIG = {
    "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 300, "max_position_embeddings": 256,
    "rope_theta": 1e4, "rms_norm_eps": 1e-5,
}  # fmt: skip
IDS = [(17 * i * i + 3 * i + 4) % 300 for i in range(12)]


def shared_sums(kind: str, raw: np.ndarray, cols: int, x: np.ndarray, parts: int, to: str) -> np.ndarray:
    """What ranks make of x times the matrix, each with its part of the columns."""
    segments = num_segments(cols, to)
    sums = []
    for first, last in map(cut(cols, parts).range, range(parts)):
        taken, rows, target = take_columns(kind, raw, cols, (first, last), to)
        matrix = pack_rows(taken, rows, len(rows), last - first, segments // parts, to=target)
        sums.append(native.product(matrix, np.ascontiguousarray(x[:, first:last])))
    return tree_sum(sums, parts)


@pytest.mark.parametrize("kind", [*KINDS, "F32 to Q8_0", "BF16 to Q4_0"])
def test_parts_of_a_sum_join_to_its_bits(kind):
    kind, _, to = kind.partition(" to ")
    random, seen = np.random.default_rng(1), set()
    for cols in (2048, 1536, 96) if kind in FLOATS and not to else (2048, 1536):
        raw = quantize(random.standard_normal((40, cols)).astype(np.float32), kind)
        x = random.standard_normal((3, cols)).astype(np.float32)
        segments = num_segments(cols, to or kind)
        expected = native.product(pack_rows(kind, raw, 40, cols, segments, to=to or kind), x)
        for parts in (p for p in (2, 4, 8) if segments % p == 0):
            seen.add(parts)
            assert np.array_equal(bits(shared_sums(kind, raw, cols, x, parts, to or kind)), bits(expected))
    assert seen == {2, 4, 8}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    def write(kind: Any, name: str) -> Path:
        return write_llama(tmp_path_factory.mktemp("gguf") / f"{name}.gguf", kind, CONFIG)

    return write


def compare(path: Path, sizes: tuple[int, ...]) -> None:
    expected = Driver(program_of(program(path)), IDS).logits(0, len(IDS))
    for size in sizes:
        ranks, models = parts_of(path, size)
        assert all(b.mlp.down.sum_parts == b.attn.out.sum_parts == size for m in models for b in m.model.layers)
        together = ranked(ranks, models)
        assert np.array_equal(bits(Driver(together, IDS).logits(0, len(IDS))), bits(expected))
        together.close()


def test_models_of_k_quants(file):
    compare(file("Q4_K", "Q4_K"), (8,))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_models_of_every_format(file, kind):
    compare(file(kind, kind), (2, 4, 8))


def test_layers_of_several_formats(file):
    """As files have them: the down of some layers is finer, and the rows that it meets are others."""
    kinds = {"blk.0.ffn_down": "Q6_K", "blk.1.ffn_down": "Q8_0", "blk.0.attn_output": "BF16", "token_embd": "Q6_K"}
    compare(file(lambda name: next((k for n, k in kinds.items() if name.startswith(n)), "Q4_K"), "mixed"), (4,))


@pytest.mark.parametrize("kind", ["Q6_K", pytest.param("Q4_0", marks=pytest.mark.slow)])
def test_a_matrix_of_one_segment_is_whole_everywhere(tmp_path, kind):
    """Its sums of 256 and 768 are one and three groups of a K-quant, which ranks cannot share."""
    path = write_mini(tmp_path / "mini.gguf", kind)
    _, models = parts_of(path, 8)
    for block in models[5].model.layers:
        assert (block.attn.out.sum_parts, block.mlp.down.sum_parts) == ((1, 1) if kind == "Q6_K" else (4, 4))
    check(path, "mini", (8,))


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["q8", "q4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_quantized_at_load(tmp_path, file, quantize, dtype):
    check(file("F32", "F32"), "llama", dtype=dtype, quantize=quantize)
