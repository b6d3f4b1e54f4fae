"""Small models for the store, whose headers say something."""

from __future__ import annotations

import json
from pathlib import Path

from tests.weights import _files as write

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}{% if tools %}T{% endif %}"


def gguf(path: Path, fill: int = 1) -> Path:
    """A Llama of one tensor, as if it were Q4_K_M. fill: what its bytes are."""
    pairs = [
        write.pair("general.architecture", write.STRING, "llama"),
        write.pair("general.file_type", write.U32, 15),
        write.pair("llama.context_length", write.U32, 2048),
        write.pair("llama.embedding_length", write.U32, 64),
        write.pair("llama.block_count", write.U32, 3),
        write.pair("llama.attention.head_count", write.U32, 8),
        write.pair("llama.attention.head_count_kv", write.U32, 2),
        write.pair("tokenizer.chat_template", write.STRING, TEMPLATE),
        write.pair("tokenizer.ggml.tokens", write.ARRAY, (write.STRING, [f"t{i}" for i in range(20)])),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write.gguf_bytes(pairs, [write.entry("a", [32, 32], 0, 0)], bytes([fill]) * 4096))
    return path


def adapter(path: Path, fill: int = 1, **config: object) -> Path:
    """A folder as peft writes one, of one small tensor."""
    path.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "org/m", **config}
    (path / "adapter_config.json").write_text(json.dumps(values))
    header = {"a": write.tensor_entry("F32", [2, 4], 0, 32)}
    (path / "adapter_model.safetensors").write_bytes(write.safetensors_bytes(header, bytes([fill]) * 32))
    return path


def gguf_adapter(path: Path) -> Path:
    pairs = [
        write.pair("general.architecture", write.STRING, "llama"),
        write.pair("general.type", write.STRING, "adapter"),
        write.pair("adapter.type", write.STRING, "lora"),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(write.gguf_bytes(pairs, [write.entry("a", [32, 32], 0, 0)], bytes(4096)))
    return path


def folder(path: Path, fill: int = 1) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {
        **{"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"head_dim": 32, "num_hidden_layers": 3, "max_position_embeddings": 512},
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    header = {"w": write.tensor_entry("BF16", [32, 32], 0, 2048)}
    (path / "model.safetensors").write_bytes(write.safetensors_bytes(header, bytes([fill]) * 2048))
    return path
