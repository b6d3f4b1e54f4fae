"""Facts about a model's files and the resources needed to run it, without reading weights.

The contents of the files are shown for every model, including models that this engine cannot run; the needs come from
the same classes that would run the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from kvasir.config import EngineOptions
from kvasir.errors import ConfigError, KvasirError
from kvasir.json_file import read_json_object
from kvasir.weights.find import find_model
from kvasir.weights.gguf_split import open_gguf
from kvasir.weights.local import ModelFiles, gguf_chat_templates
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.safetensors import SafetensorsFolder

_TOKENIZERS = {"llama": "SentencePiece", "gpt2": "byte-level BPE", "bert": "WordPiece", "t5": "Unigram"}
_SHOWN = 8  # elements of a long array
# Tables whose rows are looked up, not multiplied; names from checkpoints and from GGUF files.
_LOOKED_UP = re.compile(r"embed_tokens|embeddings|\bwte\b|\bwpe\b|_embd\.|token_types")
_HEAD = re.compile(r"(^|\.)(lm_head|output)\.weight$")
_EXPERTS = re.compile(r"\bexperts\.|_exps\b")  # those that a router chooses; a shared expert has another name
_COUNTS = ("expert_count", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = (
    *("expert_used_count", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)


@dataclass(frozen=True, slots=True)
class Stored:
    """The contents of the files. `metadata` has truncated arrays; `tokenizer` is the kind of the tokenizer."""

    files: ModelFiles
    architecture: str
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, Any]
    tokenizer: str | None
    vocabulary: int | None
    templates: tuple[str, ...]

    @property
    def parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def by_type(self) -> list[tuple[str, int, int, int]]:
        """(type, tensors, parameters, bytes), the most bytes first."""
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        for tensor in self.tensors:
            for i, amount in enumerate((1, prod(tensor.shape), tensor.nbytes)):
                sums[tensor.dtype][i] += amount
        return sorted(((name, *s) for name, s in sums.items()), key=lambda row: -row[3])  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes for one compute dtype: of the weights, and of keys and values for one token and for a full context."""

    dtype: str
    weights: int
    kv_token: int
    kv_context: int


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources for running the model on this machine's CPU. `context` is the number of tokens that the memory is
    computed for, at most `max_context`. executor: "program" or "eager"; `reason`: why it is not "program"."""

    architecture: str
    tasks: tuple[str, ...]
    vocab_size: int
    max_context: int
    context: int
    auto_dtype: str
    executor: str
    reason: str
    memory: tuple[MemoryFacts, ...] = field(default=())


# -- contents of the files -------------------------------------------------------------------------------


def read_stored(model: str, revision: str | None = None) -> Stored:
    """Raises ModelFileError. A model on the hub is only searched in the local cache."""
    files = find_model(model, revision, allow_download=False)
    return _stored_gguf(files) if files.kind == "gguf" else _stored_folder(files)


def _stored_folder(files: ModelFiles) -> Stored:
    assert files.config is not None, "a safetensors folder needs a config.json"
    config = read_json_object(files.config)
    with SafetensorsFolder(files.root) as folder:
        tensors = tuple(folder.info(name) for name in folder.names())
    names = config.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else config.get("model_type", "unknown")
    tokenizer, vocabulary = _folder_tokenizer(files)
    metadata = {key: _short(value) for key, value in config.items()}
    return Stored(files, str(architecture), tensors, metadata, tokenizer, vocabulary, tuple(files.chat_templates))


def _folder_tokenizer(files: ModelFiles) -> tuple[str | None, int | None]:
    if files.tokenizer_json is not None:
        value = read_json_object(files.tokenizer_json)
        model = value.get("model")
        model = model if isinstance(model, dict) else {}
        vocabulary = model.get("vocab")
        size = len(vocabulary) if isinstance(vocabulary, dict | list) else None
        return f"{model.get('type', 'unknown')} ({files.tokenizer_json.name})", size
    if files.tokenizer_model is None:
        return None, None
    kind = "RWKV" if files.tokenizer_model.suffix == ".txt" else "SentencePiece"
    return f"{kind} ({files.tokenizer_model.name})", None


def _stored_gguf(files: ModelFiles) -> Stored:
    with open_gguf(files.weights[0]) as model:
        tensors = tuple(
            TensorInfo(t.name, t.shape, t.ggml_type.name, t.nbytes, model.part(t.name).path)
            for t in model.tensors.values()
        )
        metadata = {key: _short(value) for key, value in model.metadata.items()}
        kind, tokens = model.metadata.get("tokenizer.ggml.model"), model.metadata.get("tokenizer.ggml.tokens")
        templates = {**gguf_chat_templates(model.metadata), **files.chat_templates}
        architecture = str(model.metadata.get("general.architecture", "unknown"))
    tokenizer = _TOKENIZERS.get(str(kind), str(kind)) if kind is not None else None
    size = len(tokens) if isinstance(tokens, list) else None
    return Stored(files, architecture, tensors, metadata, tokenizer, size, tuple(templates))


def _short(value: Any) -> Any:
    """A value with long arrays and texts truncated and their lengths stated."""
    if isinstance(value, list | tuple | np.ndarray):
        first = [_short(item) for item in list(value[:_SHOWN])]
        return first if len(value) <= _SHOWN else f"[{', '.join(map(str, first))}, ... {len(value)} in all]"
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, str) and len(value) > 400:
        return f"{value[:300]}... ({len(value)} characters)"
    if isinstance(value, dict):
        return {str(key): _short(item) for key, item in value.items()}
    return value


# -- resources to run it --------------------------------------------------------------------------------


def read_needs(files: ModelFiles, max_model_len: int | None = None) -> Needs:
    """Builds the model without weights and reads its needs.

    Raises UnsupportedModel or ModelFileError if this engine cannot run the model, ConfigError for a context beyond the
    model's positions.
    """
    from kvasir.models.registry import model_class_for
    from kvasir.ops import native
    from kvasir.runner.load import no_attention, open_checkpoint
    from kvasir.weights.load import choose_dtype

    config, source = open_checkpoint(files)
    try:
        kind = model_class_for(config)
        model = kind(kind.Config.from_hf(config))  # type: ignore[attr-defined]
        dtype = choose_dtype("auto", source)
        longest = model.config.context_length
        if max_model_len is not None and not 1 <= max_model_len <= longest:
            raise ConfigError(f"max_model_len is {max_model_len}", f"this model has 1 to {longest} positions")
        context = max_model_len or longest
        reason = native.reason() or no_attention(model)
        memory = tuple(_memory(model, source, name, context, not reason) for name in ("bfloat16", "float32"))
    finally:
        source.close()
    return Needs(
        architecture=kind.__name__,
        tasks=tuple(task.value for task in model.tasks),
        vocab_size=model.config.vocab_size,
        max_context=longest,
        context=context,
        auto_dtype=dtype,
        executor="eager" if reason else "program",
        reason=reason,
        memory=memory,
    )


def _memory(model: Any, source: Any, dtype: str, context: int, packed: bool) -> MemoryFacts:
    """Keys and values have the dtype of the weights by default. packed: weights and KV cache in the form that programs
    use."""
    from kvasir.layers.kv_layout import cache_groups
    from kvasir.program import cache as programs
    from kvasir.runner.packing import Packer
    from kvasir.runner.weight_sizes import weight_bytes

    spec, block = model.cache_spec(), EngineOptions("").block_size
    groups = programs.cache_groups(spec, block, dtype) if packed else cache_groups(spec, block, dtype)
    return MemoryFacts(
        dtype,
        weights=weight_bytes(model, source, dtype, Packer(dtype) if packed else None),
        kv_token=sum(group.bytes_per_block // block for group in groups),
        kv_context=cache_bytes(groups, block, context),
    )


def cache_bytes(groups: Iterable[Any], block: int, tokens: int) -> int:
    """Bytes that the cache groups need for one sequence of so many tokens: what is bounded (windows, states) lies in
    whole blocks."""
    total = 0
    for group in groups:
        bound = group.kind.bound
        kept = min(-(-tokens // block), -(-bound // block) + 1) * block if bound else tokens
        total += group.bytes_per_block // block * kept
    return total


@dataclass(frozen=True, slots=True)
class TokenWork:
    """The minimum work of a step: bytes of weights read for a step of any size (as stored in the file), multiply-adds
    per token, and multiply-adds per sampled token (the output matrix)."""

    weight_bytes: int
    body_macs: int
    head_macs: int


def token_work(tensors: Iterable[TensorInfo], vocab_size: int, experts: float = 1.0) -> TokenWork:
    """Every matrix except lookup tables is multiplied with every token's row; of a mixture's experts, this share."""
    looked_up, heads, body, chosen, vectors = [], [], [], [], []
    for tensor in tensors:
        is_table = bool(_LOOKED_UP.search(tensor.name)) and "norm" not in tensor.name.lower()
        matrices = chosen if _EXPERTS.search(tensor.name) else body
        group = looked_up if is_table else heads if _HEAD.search(tensor.name) else matrices
        (group if len(tensor.shape) > 1 else vectors).append(tensor)
    if not heads:  # tied: the token embedding is the output matrix too
        heads = [tensor for tensor in looked_up if tensor.shape[0] == vocab_size][:1]
    return TokenWork(
        sum(tensor.nbytes for tensor in (*heads, *body, *vectors)) + int(experts * sum(t.nbytes for t in chosen)),
        sum(prod(tensor.shape) for tensor in body) + int(experts * sum(prod(t.shape) for t in chosen)),
        sum(prod(tensor.shape) for tensor in heads),
    )


def experts_share(metadata: Mapping[str, Any]) -> float:
    """The share of a mixture's experts that compute a token; 0 if it is not known."""
    inner = metadata.get("text_config")
    values = {key.rpartition(".")[2]: value for key, value in (*metadata.items(), *(inner or {}).items())}
    counts = [
        next((values[name] for name in names if isinstance(values.get(name), int)), 0) for names in (_COUNTS, _CHOSEN)
    ]
    return min(1.0, counts[1] / counts[0]) if counts[0] else 0.0


def problem_of(error: KvasirError) -> dict[str, str]:
    return {"message": error.message, "next": error.hint}
