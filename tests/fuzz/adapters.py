"""Target: the folder or file of an adapter, read and then bound to a small model."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvasir.errors import KvasirError
from kvasir.lora import bind, is_adapter, read_adapter
from kvasir.lora.adapter import MAX_RANK, MAX_SCALE
from kvasir.models.registry import model_class_for
from tests.fuzz.mutate import mutate_json
from tests.fuzz.target import Target, scratch
from tests.weights import _files as write

CONFIGS = (
    {"model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
     "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 16, "max_position_embeddings": 32,
     "tie_word_embeddings": True},
    {"model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 4,
     "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 16, "max_position_embeddings": 32,
     "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4},
    {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 16, "vocab_size": 16},
    {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "position_embedding_type": "rotary",
     "rotary_emb_base": 50.0, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
     "num_attention_heads": 2, "vocab_size": 16, "max_position_embeddings": 66, "type_vocab_size": 1},
)  # fmt: skip
WORDS = tuple(
    """peft_type LORA r lora_alpha target_modules exclude_modules target_parameters modules_to_save rank_pattern
    alpha_pattern use_rslora use_dora lora_bias bias all lora_only layers_to_transform layers_pattern layers
    trainable_token_indices alora_invocation_tokens ensure_weight_tying init_lora_weights pissa fan_in_fan_out
    all-linear q_proj down_proj embed_tokens lm_head mlp.experts.gate_up_proj mlp.experts.down_proj mlp.gate.weight
    (.*\\.)? (a*)*$ [^.]+ fine_tune_type lora_parameters scale rank dora full F32 F16 BF16 I8
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight
    base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector
    base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight
    base_model.model.model.layers.0.mlp.experts.lora_B.weight
    base_model.model.model.embed_tokens.lora_embedding_A base_model.model.lm_head.weight
    base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta
    model.layers.0.self_attn.q_proj.lora_a model.layers.0.mlp.switch_mlp.up_proj.lora_b adapters adapter_model
    lora_adaptations a lora_rank roberta.encoder.layers.0.mlp.fc1.parametrizations.weight.0.lora_A
    roberta.embeddings.word_embeddings.parametrizations.weight.0.lora_B task
    general.type adapter adapter.type lora adapter.lora.alpha adapter.alora.invocation_tokens general.architecture
    blk.0.attn_q.weight.lora_a blk.0.attn_q.weight.lora_b token_embd.weight.lora_a""".split()
)
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64, "I8": np.int8}
_GGUF_TYPES = {"F32": 0, "F16": 1, "BF16": 30, "F64": 28, "I8": 24}


@cache
def models() -> tuple[tuple[Any, dict[str, Any]], ...]:
    kinds = [model_class_for(config) for config in CONFIGS]
    made = (kind(kind.Config.from_hf(config)) for kind, config in zip(kinds, CONFIGS, strict=True))  # type: ignore[attr-defined]
    return tuple(zip(made, CONFIGS, strict=True))


def read(data: bytes) -> None:
    """{"config": adapter_config.json, config.json or a GGUF file's metadata, "file": "gguf", "task" for the task "a" of
    a model's own, or anything else, "tensors": {name: [dtype, shape]}, "value": of all numbers}"""
    path = written(data)
    if path is None:
        return
    is_adapter(path)
    file = read_adapter(path)
    for update in file.updates:
        assert 1 <= update.rank <= MAX_RANK and abs(update.scale) <= MAX_SCALE
        assert update.experts * update.rank in (update.a.shape[0], update.experts * update.a.shape[1])
    for model, config in models():
        with suppress(KvasirError), np.errstate(over="ignore", invalid="ignore"):
            adapter = bind(file, model, config)
            shapes = {f"{path}.{name}": shape for path, leaf in model.walk() for name, shape in leaf.expects().items()}
            shapes.setdefault("head.weight", shapes["embed.weight"])
            for slot, change in adapter.matrices.items():
                assert change.delta().shape == shapes[f"{slot}.weight"]
                assert all(v is None or v.shape == (change.b.shape[0],) for v in (change.magnitude, change.bias))
            for slot, change in adapter.tables.items():
                assert change.delta().shape[::-1] == shapes[f"{slot}.weight"]
            assert all(array.shape == shapes[name] for name, array in adapter.saved.items())
            for slot, rows in adapter.tokens.items():
                assert rows.rows.shape == (len(rows.ids), shapes[f"{slot}.weight"][1])
                assert max(rows.ids, default=0) < shapes[f"{slot}.weight"][0]


def written(data: bytes) -> Path | None:
    """The adapter's folder or file; None if the input says nothing."""
    given: Any = None
    with suppress(ValueError, RecursionError):
        given = json.loads(data)
    if not isinstance(given, dict) or not isinstance(given.get("tensors"), dict):
        return None
    tensors, value = list(_tensors(given["tensors"])), given.get("value")
    value = value if isinstance(value, int | float) and abs(value) < 1e38 else 0.0
    folder = scratch() / "adapter"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if given.get("file") == "gguf":
        return _gguf(folder / "a.gguf", given.get("config"), tensors, value)
    name = "config.json" if given.get("file") == "task" else "adapter_config.json"
    (folder / name).write_bytes(json.dumps(given.get("config")).encode("utf-8", "surrogatepass"))
    header, content = {}, b""
    for name, dtype, shape in tensors:
        at, content = len(content), content + _filled(dtype, shape, value)
        header[name] = write.tensor_entry(dtype, shape, at, len(content))
    for name in ("adapters.safetensors", "adapter_model.safetensors", "model.safetensors"):
        (folder / name).write_bytes(write.safetensors_bytes(header, content))
    return Path(f"{folder}#a") if given.get("file") == "task" else folder


def _filled(dtype: str, shape: list[int], value: float) -> bytes:
    """An array of this value, with other signs from number to number."""
    array = np.full(prod(shape), value, np.float32)
    array[1::3] *= -1
    with np.errstate(all="ignore"):
        return array.astype(_DTYPES[dtype]).tobytes()


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, str, list[int]]]:
    total = 0
    for name, entry in given.items():
        dtype, shape = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if dtype not in list(_DTYPES) or not isinstance(shape, list) or len(shape) > 4:
            continue
        if not all(type(size) is int and 0 <= size <= 4096 for size in shape):
            continue
        total += prod(shape)
        if total <= 1 << 16:
            yield name, dtype, shape


def _gguf(path: Path, config: Any, tensors: list[tuple[str, str, list[int]]], number: float) -> Path:
    pairs, entries, content = [], [], b""
    for key, value in (config if isinstance(config, dict) else {}).items():
        name = key.encode("utf-8", "surrogatepass")
        if isinstance(value, str):
            pairs.append(write.pair(name, write.STRING, value.encode("utf-8", "surrogatepass")))
        elif isinstance(value, int | float) and abs(value) < 1e30:
            pairs.append(write.pair(name, write.F32, float(value)))
        elif isinstance(value, list) and all(type(one) is int and 0 <= one < 2**32 for one in value):
            pairs.append(write.pair(name, write.ARRAY, (write.U32, value)))
    for name, dtype, shape in tensors:
        entries.append(
            write.entry(name.encode("utf-8", "surrogatepass"), shape[::-1], _GGUF_TYPES[dtype], len(content))
        )
        content += _filled(dtype, shape, number)
        content += bytes(-len(content) % 32)
    with suppress(struct.error):
        path.write_bytes(write.gguf_bytes(pairs, entries, content))
    return path


TARGETS = {"adapter": Target(read, mutate=partial(mutate_json, words=WORDS))}
