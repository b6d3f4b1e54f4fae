"""Targets: the files of a model, alone and as a folder."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError, UnsupportedModel
from kvasir.models.config import read_generation_config, read_hf_config
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_view import HFView
from kvasir.models.pooling import Pooling, pooling_of, read_pooling
from kvasir.models.registry import model_class_for
from kvasir.quant.gguf_types import GGMLType
from kvasir.store.facts import read_details, read_model_info
from kvasir.text.prompts import read_prompts
from kvasir.weights.gguf import GGUFFile
from kvasir.weights.gguf_split import open_gguf
from kvasir.weights.local import find_local, gguf_chat_templates
from kvasir.weights.safetensors import SafetensorsFile, SafetensorsFolder, weight_files
from kvasir.weights.source import GGUFSource
from tests.fuzz.mutate import mutate_json, mutate_safetensors
from tests.fuzz.target import Target, placed, scratch
from tests.fuzz.tokenizers import from_folder, from_gguf, use
from tests.weights import _files as write

CONFIG_WORDS = tuple(
    """model_type architectures hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    vocab_size intermediate_size rope_theta rope_scaling rope_type factor factors short_factor long_factor
    attention_factor original_max_position_embeddings max_position_embeddings rms_norm_eps sliding_window
    layer_types full_attention sliding_attention linear_attention tie_word_embeddings quantization_config
    text_config rope_parameters partial_rotary_factor eos_token_id bos_token_id hidden_act hidden_activation
    auto_map llama qwen2 qwen3 qwen3_moe qwen3_next gemma2 gemma3 gemma3_text gpt2 mistral mixtral phi3 bert
    yarn llama3 longrope linear dynamic default num_experts num_experts_per_tok moe_intermediate_size
    pooling_mode chat_template bos_token roberta xlm-roberta distilbert modernbert eurobert nomic_bert new gte
    BertForSequenceClassification Qwen3ForSequenceClassification id2label label2id num_labels problem_type
    sentence_transformers activation_fn pad_token_id local_attention classifier_pooling""".split()
)
GGUF_WORDS = tuple(
    """general.architecture general.alignment general.file_type general.name llama.block_count
    llama.attention.head_count llama.attention.head_count_kv llama.attention.key_length llama.embedding_length
    llama.rope.scaling.type llama.rope.freq_base llama.expert_count llama.attention.sliding_window llama.vocab_size
    tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.scores tokenizer.ggml.merges
    tokenizer.ggml.token_type tokenizer.ggml.eos_token_id tokenizer.ggml.precompiled_charsmap split.no split.count
    split.tensors.count tokenizer.chat_template token_embd.weight blk.0.attn_q.weight blk.0.ffn_gate_exps.weight
    rope_freqs.weight rope_factors_short.weight rope_factors_long.weight output.weight""".split()
)
Step = Callable[[], object]


def each(*steps: Step) -> None:
    """All of them: what one refuses, another may not."""
    for step in steps:
        with suppress(KvasirError):
            step()


# --- containers -------------------------------------------------------------------------------------


def read_safetensors(data: bytes) -> None:
    file = SafetensorsFile(placed("a.safetensors", data))
    size = 0
    for name, info in file.tensors.items():
        size += file.raw(name).size
        with suppress(UnsupportedModel):
            assert file.array(name).shape == info.shape
    assert size <= len(data) - 8
    file.close()


def read_index(data: bytes) -> None:
    """An index over two shards that are there."""
    folder = scratch() / "index"
    folder.mkdir(exist_ok=True)
    for name in "ab":
        header = {name: write.tensor_entry("U8", [4], 0, 4)}
        (folder / f"{name}.safetensors").write_bytes(write.safetensors_bytes(header, b"1234"))
    (folder / "model.safetensors.index.json").write_bytes(data)
    each(lambda: weight_files(folder))
    with SafetensorsFolder(folder) as model:
        assert all(model.raw(name).tobytes() == b"1234" for name in model.names())


def read_gguf(data: bytes) -> None:
    with GGUFFile(placed("a.gguf", data)) as file:
        for tensor in file.tensors.values():
            assert 0 <= tensor.offset <= tensor.offset + tensor.nbytes <= len(data)
            assert file.data(tensor.name).size == tensor.nbytes
    _use_gguf(placed("a.gguf", data))


def _use_gguf(path: Path) -> None:
    """All that is read of a file before its weights are."""
    with open_gguf(path) as model:
        files = find_local(path)
        each(
            lambda: use(from_gguf(model.metadata)),
            lambda: gguf_chat_templates(model.metadata),
            lambda: read_details(files),
            lambda: json.dumps(read_model_info(files, verbose=True)),
            lambda: _use_tensors(GGUFSource(path)),
        )


def _use_tensors(source: GGUFSource) -> None:
    config = hf_config_from_gguf(source.model.metadata, source)
    view = HFView(source, config, str(source.model.metadata["general.architecture"]))
    for name in view.names():
        info = view.info(name)
        if prod(info.shape) < 1 << 20:
            assert tuple(view.array(name).shape) == tuple(info.shape)
    _use_config(config)


def _use_config(config: dict[str, Any]) -> None:
    model_class_for(config).Config.from_hf(config)


# --- a GGUF written from JSON, so that changes stay within the format -----------------------------------


def read_gguf_model(data: bytes) -> None:
    """{"metadata": {key: value}, "tensors": {name: [shape, type]}}"""
    reported = _object(data)
    pairs = [_pair(key, value) for key, value in _inner(reported, "metadata").items()]
    entries, size = [], 0
    for name, entry in _inner(reported, "tensors").items():
        shape, kind = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
        if not isinstance(shape, list) or not all(_is_in(n, 64) for n in [*shape, kind]) or len(shape) > 8:
            continue
        entries.append(write.entry(_bytes(name), shape[::-1], kind, size))
        size += _num_bytes(shape, kind)
    if size < 1 << 20:
        _use_gguf(placed("m.gguf", write.gguf_bytes([pair for pair in pairs if pair], entries, bytes(size))))


def _num_bytes(shape: list[int], kind: int) -> int:
    with suppress(ValueError):
        return -(-GGMLType(kind).row_bytes(prod(shape)) // 32) * 32
    return 32


def _pair(key: str, value: Any) -> bytes:
    kind, content = _typed(value)
    if kind < 0:
        return b""
    try:
        return write.pair(_bytes(key), kind, content)
    except struct.error:  # numbers of different sizes in one array
        return b""


def _typed(value: Any) -> tuple[int, Any]:
    """A value's type in the file and its content; -1 for what the format cannot say."""
    if isinstance(value, bool):
        return write.BOOL, value
    if isinstance(value, int):
        return next(((kind, value) for kind, low, high in _RANGES if low <= value < high), (-1, None))
    if isinstance(value, float):
        return write.F64, value
    if isinstance(value, str):
        return write.STRING, _bytes(value)
    if not isinstance(value, list):
        return -1, None
    items = [_typed(item) for item in value]
    kinds = {kind for kind, _ in items} or {write.U32}
    if kinds <= {write.U32, write.I64, write.F64}:
        kind = max(kinds, key=(write.U32, write.I64, write.F64).index)
        return write.ARRAY, (kind, [content for _, content in items])
    return (write.ARRAY, (kinds.pop(), [content for _, content in items])) if len(kinds) == 1 != -1 else (-1, None)


_RANGES = ((write.U32, 0, 2**32), (write.I64, -(2**63), 2**63), (write.U64, 0, 2**64))


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _is_in(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


# --- a folder written from JSON ---------------------------------------------------------------------

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": i, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False} for i, text in enumerate(("<s>", "</s>"))
    ],
    "normalizer": None, "pre_tokenizer": None, "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3, "ab": 4}, "merges": [["a", "b"]]},
}  # fmt: skip
FILES = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.json", "chat_template.jinja", "model.safetensors.index.json", "modules.json"),
    *("1_Pooling/config.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
    *("2_Dense/config.json", "1_LogitScore/config.json"),
)


def read_folder(data: bytes) -> None:
    """{file name: its text, or JSON}, beside fixed weights and a fixed tokenizer."""
    reported = _object(data)
    folder = scratch() / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("1_Pooling", "2_Dense", "1_LogitScore"):
        (folder / name).mkdir(parents=True)
    weights = write.safetensors_bytes({"w": write.tensor_entry("F32", [2], 0, 8)}, struct.pack("<2f", 1, 2))
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    for name in FILES:
        if name in reported:
            text = reported[name] if isinstance(reported[name], str) else json.dumps(reported[name])
            (folder / name).write_bytes(_bytes(text))
    each(
        lambda: use(from_folder(folder)),
        lambda: _use_folder_config(folder),
        lambda: read_generation_config(folder),
        lambda: read_prompts(folder).of(None),
        lambda: _use_files(folder),
    )


def _use_folder_config(folder: Path) -> None:
    config = {**read_hf_config(folder), **read_pooling(folder)}
    each(lambda: pooling_of(config, Pooling()), lambda: read_generation_config(folder, config))
    _use_config(config)


def _use_files(folder: Path) -> None:
    files = find_local(folder)
    each(lambda: read_details(files), lambda: json.dumps(read_model_info(files)))
    assert all(isinstance(text, str) for text in files.chat_templates.values())


def _object(data: bytes) -> dict[str, Any]:
    """The input; what is no JSON at all says nothing."""
    with suppress(ValueError, RecursionError):
        value = json.loads(data)
        return value if isinstance(value, dict) else {}
    return {}


def _inner(value: dict[str, Any], key: str) -> dict[str, Any]:
    return value[key] if isinstance(value.get(key), dict) else {}


TARGETS = {
    "safetensors": Target(read_safetensors, mutate=mutate_safetensors),
    "index": Target(read_index, mutate=partial(mutate_json, words=("weight_map", "a.safetensors", "b.safetensors"))),
    "gguf": Target(read_gguf, words=(*GGUF_WORDS, b"GGUF", b"\3\0\0\0")),
    "gguf_model": Target(read_gguf_model, mutate=partial(mutate_json, words=GGUF_WORDS)),
    "folder": Target(read_folder, mutate=partial(mutate_json, words=(*CONFIG_WORDS, *FILES))),
}
