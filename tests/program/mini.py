"""kvasir-mini as GGUF files in any type of tensor, and a text that it knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from kvasir.layers.tensors import tensor_of
from kvasir.weights.find import find_model
from kvasir.weights.source import SafetensorsSource
from tests.quant.kquants import quantize

FOLDER = find_model("kvasir-mini").root
TEXT = """<|im_start|>user
My name is Anna and I live in Rome.<|im_end|>
<|im_start|>assistant
Nice to meet you, Anna.<|im_end|>
<|im_start|>user
What is 27 plus 15? And where do I live?<|im_end|>
<|im_start|>assistant
27 plus 15 is 42. You live in Rome.<|im_end|>
<|im_start|>user
Thank you. Tell me a story.<|im_end|>
"""


@cache
def ids_of(text: str = TEXT) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids


@cache
def tensors() -> dict[str, np.ndarray]:
    """The weights in float32, by their names and with their order of rows in a GGUF file."""
    config = _config()
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    source, found = SafetensorsSource(FOLDER), {}
    for name in source.names():
        weight = tensor_of(source.array(name)).float().numpy()
        role = name.split(".")[-2]
        if role in heads:  # llama.cpp turns neighbours, Hugging Face halves
            weight = weight.reshape(heads[role], 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        found[names.get_name(name, (".weight",))] = weight
    return found


def write_mini(path: Path, kind: str | Callable[[str], str], tokens: bool = False) -> Path:
    """Writes the model with all its matrices in GGML type `kind`, or in that of each name; the norms in F32. tokens:
    with its vocabulary, which llama.cpp's server needs."""
    return _write(path, kind, _config(), tensors(), add_vocabulary if tokens else None)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """kvasir-mini's own tokens."""
    found = json.loads((FOLDER / "tokenizer.json").read_text())
    names = {i: token for token, i in found["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in found["added_tokens"]}
    ids = range(_config()["vocab_size"])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([special.get(i) or names.get(i, f"<unused {i}>") for i in ids])
    writer.add_token_types([kinds[i in special] for i in ids])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]])
    writer.add_eos_token_id(_config()["eos_token_id"])
    writer.add_add_bos_token(False)


def write_llama(path: Path, kind: str | Callable[[str], str], config: dict[str, Any]) -> Path:
    """The same of a model of random weights with an own head; config: as of Hugging Face."""
    random, shapes = np.random.default_rng(7), _shapes(config)
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    scaled = {n: w * 1.5 * w.shape[1] ** -0.5 if w.ndim == 2 else 1 + 0.1 * w for n, w in weights.items()}
    return _write(path, kind, config, {n: w.astype(np.float32) for n, w in scaled.items()})


def _config() -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text())


def _shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    width, inner, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = (c["head_dim"] * c[name] for name in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "attn_norm": (width,), "attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width),
        "attn_output": (width, q), "ffn_norm": (width,), "ffn_gate": (inner, width), "ffn_up": (inner, width),
        "ffn_down": (width, inner),
    }  # fmt: skip
    layers = {f"blk.{i}.{n}.weight": s for i in range(c["num_hidden_layers"]) for n, s in layer.items()}
    return {
        "token_embd.weight": (vocab, width),
        "output_norm.weight": (width,),
        "output.weight": (vocab, width),
    } | layers


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata of a Llama but for its vocabulary; config: as of Hugging Face."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write(
    path: Path,
    kind: str | Callable[[str], str],
    config: dict[str, Any],
    weights: dict[str, np.ndarray],
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_sizes(writer, config)
    if vocabulary:
        vocabulary(writer)
    else:
        writer.add_tokenizer_model("none")  # ids are enough
    for name, weight in weights.items():
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            own = kind if isinstance(kind, str) else kind(name)
            writer.add_tensor(name, quantize(weight, own), raw_dtype=gguf.GGMLQuantizationType[own])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
