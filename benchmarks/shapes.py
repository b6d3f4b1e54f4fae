"""Models of real shapes with random weights, for measurements on machines without real models.

    python benchmarks/shapes.py qwen3-0.6b /tmp/qwen3-0.6b

Weights are bfloat16, normal with deviation 1 / sqrt(row length), from a seed. There is no tokenizer:
`kvasir bench` sends token ids. The sizes are those of the published models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _COMMON
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "llama-1b": _COMMON
    | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "mlp_bias": False,
    },
}


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensor names of the published checkpoints with their shapes; matrices are [outputs, inputs]."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    yield "model.norm.weight", (width,)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        yield layer + "input_layernorm.weight", (width,)
        yield layer + "post_attention_layernorm.weight", (width,)
        for name, shape in (("q", (q, width)), ("k", (kv, width)), ("v", (kv, width)), ("o", (width, q))):
            yield f"{layer}self_attn.{name}_proj.weight", shape
        if config["model_type"] == "qwen3":
            yield layer + "self_attn.q_norm.weight", (head,)
            yield layer + "self_attn.k_norm.weight", (head,)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            yield f"{layer}mlp.{name}_proj.weight", shape


def write(config: dict[str, Any], folder: Path, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)

    def fill(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape).normal_(0, shape[-1] ** -0.5, generator=random).to(torch.bfloat16)

    save_file({name: fill(shape) for name, shape in tensor_shapes(config)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(SHAPES[args.shape], args.folder, args.seed)


if __name__ == "__main__":
    main()
