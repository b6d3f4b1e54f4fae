"""The drafters that vLLM's `speculative_config` asks for, in this engine's options.

Settings that only tune how a drafter of that engine guesses have no effect here, which a note says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvasir.config import EngineOptions
from kvasir.environment import user_path
from kvasir.errors import ConfigError, quoted
from kvasir.speculation import MAX_DRAFTED, SOURCES, parse

# vLLM's methods -> ours, besides its names of MTP for each family. Its suffix trees include the sequence's own.
_VLLM = {
    "ngram": ("ngram",),
    "ngram_gpu": ("ngram",),
    "suffix": ("ngram", "suffix"),
    "draft_model": ("draft",),
    "eagle3": ("eagle3",),
    "dflash": ("dflash",),
    "dspark": ("dflash",),
    "mtp": ("mtp",),
}
_TUNING = (
    *("prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor"),
    *("suffix_decoding_max_cached_requests", "suffix_decoding_min_token_prob", "enforce_eager", "parallel_drafting"),
    *("draft_tensor_parallel_size", "disable_padded_drafter_batch", "use_local_argmax_reduction", "moe_backend"),
    *("attention_backend", "speculative_token_tree", "disable_by_batch_size"),
    *("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "draft_sample_method"),
    *("rejection_sample_method", "use_heterogeneous_vocab"),
)
# llama.cpp's and vLLM's names of types of keys and values -> ours.
_KV_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "int8", "fp8_e4m3": "fp8"}
MEASURED = "how much is drafted follows from measurements"
_KEYS = ("method", "model", "num_speculative_tokens", "max_model_len", "kv_cache_dtype", "quantization")


def from_vllm(options: EngineOptions, config: Mapping[str, Any], notes: list[str]) -> EngineOptions:
    """The options with what vLLM's `speculative_config` asks for; adds notes for the user. Raises ConfigError."""
    if tuning := [key for key in config if key in _TUNING]:
        notes.append(f"no effect in speculative_config: {', '.join(tuning)}; {MEASURED}")
    if unknown := [key for key in config if key not in (*_KEYS, *_TUNING)]:
        expected = f"expected {', '.join(_KEYS)}, or a setting of vLLM's drafters"
        raise ConfigError(f"speculative_config has {quoted(unknown[0])}", expected)
    speculate = _method(config.get("method"), config.get("model"), notes)
    options = _with_length(options, config.get("max_model_len"), speculate, notes)
    check_kv_dtype("kv_cache_dtype", config.get("kv_cache_dtype"), options.kv_dtype)
    if config.get("quantization") is not None:
        notes.append(
            "quantization in speculative_config has no effect: the files say it; --draft-quantize quantizes floats"
        )
    most = config.get("num_speculative_tokens")
    if most is None:
        return replace(options, speculate=speculate)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ConfigError(f"num_speculative_tokens is {quoted(most)}", "expected a number from 1 on")
    if most > MAX_DRAFTED:
        notes.append(f"num_speculative_tokens is {most}; at most {MAX_DRAFTED} are drafted")
    return replace(options, speculate=speculate, draft_max=min(most, MAX_DRAFTED))


def _with_length(options: EngineOptions, length: Any, speculate: str, notes: list[str]) -> EngineOptions:
    if length is None:
        return options
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"max_model_len of speculative_config is {quoted(length)}", "expected a number from 1 on")
    if not parse(speculate).weights:
        notes.append(f"max_model_len in speculative_config has no effect: {speculate} has no weights")
        return options
    return replace(options, draft_max_model_len=length)


def _method(method: Any, model: Any, notes: list[str]) -> str:
    if not isinstance(model, str | None):
        raise ConfigError(f"the model of speculative_config is {quoted(model)}", "expected a name or a path")
    if method is None and model is None:
        raise ConfigError("speculative_config has neither method nor model", f"method is one of {', '.join(_VLLM)}")
    if method is None:
        return source_of(model or "")
    names = ("mtp",) if isinstance(method, str) and method.endswith("_mtp") else ()
    names = names or (_VLLM.get(method) if isinstance(method, str) else None)
    if names is None:
        raise ConfigError(f"speculative_config has the method {quoted(method)}", f"expected {', '.join(_VLLM)}")
    if names == ("mtp",) and model is not None and kind_of(model) == "assistant":
        return f"draft={model}"
    if names[0] not in SOURCES:
        if model is not None:
            notes.append(f"the model of speculative_config has no effect: {method} reads no other checkpoint")
        return ",".join(names)
    if not model:
        raise ConfigError(f"{method} needs a model", 'give "model" in speculative_config')
    return f"{names[0]}={model}"


def check_kv_dtype(name: str, given: Any, kv_dtype: str) -> None:
    """Raises ConfigError for a type of a drafter's keys or values that is not that of the model's."""
    ours = _KV_DTYPES.get(given, given) if isinstance(given, str) else given
    if ours not in (None, "auto", kv_dtype):
        raise ConfigError(
            f"{name} is {quoted(given)}, and --kv-dtype {kv_dtype}",
            "the keys and values of a drafter lie in its model's blocks and have their type: set --kv-dtype for both",
        )


def source_of(model: str) -> str:
    """The drafter that a path or a name stands for, as `speculate` names it."""
    kind = kind_of(model)
    return f"{kind if kind in SOURCES else 'draft'}={model}"


def kind_of(model: str) -> str:
    """Whether a path is an EAGLE-3 head ("eagle3"), a DFlash or DSpark drafter ("dflash"), an assistant of Gemma 4
    ("assistant"), which both engines call a head for multi-token prediction, or a model ("draft"); one that is not on
    this machine is judged by its name."""
    path = user_path(model)
    if path.suffix == ".gguf" and path.is_file():
        from kvasir.weights.gguf import GGUFFile

        with GGUFFile(path) as file:
            architecture = str(file.metadata.get("general.architecture"))
            return {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "assistant"}.get(architecture, "draft")
    if (path / "config.json").is_file():
        from kvasir.models.config import read_hf_config
        from kvasir.models.dflash_config import is_dflash
        from kvasir.models.eagle3_config import is_eagle3
        from kvasir.models.gemma4_assistant import is_assistant

        config = read_hf_config(path / "config.json")
        kinds = {"assistant": is_assistant, "eagle3": is_eagle3, "dflash": is_dflash}
        return next((kind for kind, check in kinds.items() if check(config)), "draft")
    name = model.lower().replace("dspark", "dflash")
    return next((kind for kind in ("eagle3", "dflash", "assistant") if kind in name), "draft")
