"""Models of real shapes with random weights that are made where they are used: nothing is read or copied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from kvasir.graph.matrices import split_rows
from kvasir.layers.embedding import Embedding
from kvasir.layers.linear import QKV, Head, Linear
from kvasir.layers.tensors import TensorPlace, torch_dtype
from kvasir.models.registry import model_class_for
from kvasir.ops.linear.triton_matrix import CHUNK, GGUF, LAYOUTS, DeviceMatrix, stacked
from kvasir.runner.device_packing import segments_of

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {
        **QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28,
        "tie_word_embeddings": True,
    },
    "8B": {
        **QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
TINY = {
    **QWEN3, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 160, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
ALL_SHAPES = {**SHAPES, "tiny": TINY}
FORMATS = ("BF16", "F8_BLOCK", "Q4_K", "F8_ROW", "Q8_0", "Q4_0")
# The root of the mean square of the levels of random codes.
_RMS = {"F8_BLOCK": 68.5, "F8_ROW": 68.5, "Q8_0": 73.9, "Q4_0": 4.64, "Q4_K": 4.61 * 36.7}
_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

MakeMatrix = Callable[[Any, int, int], DeviceMatrix]


def model_with(config: dict[str, Any], make: MakeMatrix, device: Any) -> Any:
    """The model of a config, all norms 1.

    make: of a leaf, the rows and columns, its matrix.
    """
    kind = model_class_for(config)
    model = kind(kind.Config.from_hf(config))
    place = TensorPlace(torch.float32, device)
    for _, leaf in model.walk():
        for tensor, shape in leaf.expects().items():
            if isinstance(leaf, Linear | Embedding) and tensor.rpartition(".")[2] == "weight":
                rows, cols = shape
                leaf.hold(tensor, make(leaf, rows, cols))
            else:
                leaf.put(tensor, torch.ones(shape, device=device), place)
        if isinstance(leaf, QKV):
            held: dict[str, Any] = leaf.weights
            whole = stacked([held[part] for part in leaf.outputs])
            held.update(zip(leaf.outputs, split_rows(whole, list(leaf.outputs.values())), strict=True))
    return model


def config_of(shape: str, layers: int = 0) -> dict[str, Any]:
    """layers: how many, 0 for all."""
    return {**ALL_SHAPES[shape], **({"num_hidden_layers": layers} if layers else {})}


def random_model(config: dict[str, Any], format: str, device: Any) -> Any:
    """The model with random matrices of a format; the vocabulary's matrices are bfloat16 beside 8-bit floats, as in the
    checkpoints in those formats."""
    width, vocab = config["hidden_size"], config["vocab_size"]

    def make(leaf: Any, rows: int, cols: int) -> DeviceMatrix:
        own = "BF16" if format.startswith("F8") and (rows, cols) == (vocab, width) else format
        return random_matrix(rows, cols, segments_of(leaf, rows, cols, own), own, device)

    torch.manual_seed(0)
    return model_with(config, make, device)


def random_matrix(rows: int, cols: int, segments: int, format: str, device: Any) -> DeviceMatrix:
    """Finite weights with a deviation of about 1 / sqrt(cols). See DeviceMatrix for the layouts."""
    deviation = cols**-0.5
    if format in _FLOATS:
        dtype = _FLOATS[format]
        data = torch.empty((rows, cols), dtype=torch_dtype(dtype), device=device).normal_(0.0, deviation)
        return DeviceMatrix(format, rows, cols, segments, dtype, data)
    layout, chunks = LAYOUTS[format], -(-cols // CHUNK)
    scale = deviation / _RMS[format]
    words = (rows, chunks * CHUNK * layout.bits // 32)
    data = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device=device)
    found = DeviceMatrix(format, rows, cols, segments, "bfloat16", data)
    if format.startswith("F8"):
        data.bitwise_and_(-0x08080809)  # a bit of each exponent, so that there is no NaN
        groups = chunks if layout.group else 1
        return replace(found, scales=torch.full((rows, groups), scale, dtype=torch.float32, device=device))
    if format == "Q4_K":
        steps = torch.randint(1, 64, (rows, 4 * chunks), dtype=torch.int16, device=device)
        halves = torch.tensor([scale, 7.5 * scale], dtype=torch.float16).view(torch.int32).to(device)
        mins = halves.expand(rows, cols // 256).contiguous()
        return replace(found, scales=steps + (steps << 8), mins=mins)  # the minimum centres the levels
    assert format in GGUF
    return replace(found, scales=torch.full((rows, 4 * chunks), scale, dtype=torch.float16, device=device))


def matrices(model: Any) -> list[tuple[Any, DeviceMatrix]]:
    """Every matrix with the leaf that holds it; a tied one once."""
    found: list[tuple[Any, DeviceMatrix]] = []
    for _, leaf in model.walk():
        if isinstance(leaf, Linear):
            weights: dict[str, Any] = leaf.weights
            found += [(leaf, matrix) for matrix in weights.values()]
        elif isinstance(leaf, Embedding):
            found.append((leaf, cast(Any, leaf.weight)))
    return list({id(matrix): (leaf, matrix) for leaf, matrix in found}.values())


def bytes_read(model: Any) -> int:
    """Bytes of the matrices that every step reads: all but a table that is only looked up."""
    tied = any(leaf.tied is not None for _, leaf in model.walk() if isinstance(leaf, Head))
    return sum(matrix.nbytes for leaf, matrix in matrices(model) if tied or not isinstance(leaf, Embedding))


def multiply_adds(model: Any) -> int:
    """Multiply-adds of a token row, without attention and the logits."""
    return sum(matrix.rows * matrix.cols for leaf, matrix in matrices(model) if not isinstance(leaf, Embedding | Head))
