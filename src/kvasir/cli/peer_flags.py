"""Flags of other engines for drafters, and how they map to ours: vLLM's --speculative-config, and llama.cpp's.

Settings that only tune how a drafter of that engine guesses have no effect here, which a note says: how much is drafted
follows from measurements, and no draft changes a token. Settings that would place a drafter elsewhere than its model
are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.config import EngineOptions, option
from kvasir.errors import ConfigError, quoted
from kvasir.speculation import MAX_DRAFTED, SOURCES, parse

# llama.cpp's --spec-type -> ours. Its pools of n-grams outlive a sequence, so they are `suffix` as well.
_LLAMA = {
    "none": ("off",),
    "ngram-simple": ("ngram",),
    "ngram-map-k": ("ngram",),
    "ngram-map-k4v": ("ngram",),
    "ngram-mod": ("ngram", "suffix"),
    "ngram-cache": ("ngram", "suffix"),
    "draft-simple": ("draft",),
    "draft-eagle3": ("eagle3",),
    "draft-mtp": ("mtp",),
}
_NGRAMS = ("simple", "map-k", "map-k4v")
_LLAMA_ONLY = ("draft-dflash", "draft-dspark")
# vLLM's methods -> ours, besides its names of MTP for each family. Its suffix trees include the sequence's own.
_VLLM = {
    "ngram": ("ngram",),
    "ngram_gpu": ("ngram",),
    "suffix": ("ngram", "suffix"),
    "draft_model": ("draft",),
    "eagle3": ("eagle3",),
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
# Refused fields of PeerFlags -> the flag as llama.cpp prints it, and why.
_REFUSED = {
    "draft_device": ("-ngld and -devd", "a drafter computes where its model does; --device is for both"),
    "draft_threads": ("-td and -tbd", "a drafter has its model's threads; --threads is for both"),
    "lookup_cache": ("-lcs and -lcd", "earlier answers are kept in memory, by key: --speculate suffix"),
}
_MEASURED = "how much is drafted follows from measurements"
_KEYS = ("method", "model", "num_speculative_tokens", "max_model_len", "kv_cache_dtype", "quantization")


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """Flags of engine commands besides those of EngineOptions."""

    speculative_config: str | None = option(
        None,
        'As vLLM takes it, for example {"method": "ngram", "num_speculative_tokens": 5}: method, model, '
        "num_speculative_tokens, max_model_len.",
        "--speculative-config",
        "-sc",
    )
    spec_method: str | None = option(None, "vLLM's method alone, as in --speculative-config.", "--spec-method")
    spec_tokens: int | None = option(None, "vLLM's num_speculative_tokens alone.", "--spec-tokens")
    model_draft: str | None = option(
        None,
        "As llama.cpp and vLLM take it: a draft model or an EAGLE-3 head.",
        *("--model-draft", "-md", "--spec-draft-model", "--hf-repo-draft", "-hfd", "-hfrd", "--spec-draft-hf"),
        "--spec-model",
    )
    ctx_size_draft: int | None = option(
        None, "llama.cpp's --draft-max-model-len; 0 for no limit.", "--ctx-size-draft", "-cd", "--spec-draft-ctx-size"
    )
    cache_type_k_draft: str | None = option(
        None,
        "llama.cpp's; must be the type of the model's own keys.",
        *("--cache-type-k-draft", "-ctkd", "--spec-draft-type-k"),
    )
    cache_type_v_draft: str | None = option(
        None,
        "llama.cpp's; must be the type of the model's own values.",
        *("--cache-type-v-draft", "-ctvd", "--spec-draft-type-v"),
    )
    draft_min: int | None = option(
        None, "llama.cpp's; no effect.", "--draft-min", "--draft-n-min", "--spec-draft-n-min"
    )
    draft_p_min: float | None = option(None, "llama.cpp's; no effect.", "--draft-p-min", "--spec-draft-p-min")
    draft_p_split: float | None = option(None, "llama.cpp's; no effect.", "--draft-p-split", "--spec-draft-p-split")
    ngram_sizes: str | None = option(
        None,
        "llama.cpp's; no effect.",
        *(f"--spec-ngram-{kind}-{size}" for kind in _NGRAMS for size in ("size-n", "size-m", "min-hits")),
        *(f"--spec-ngram-mod-n-{size}" for size in ("min", "max", "match")),
        hidden=True,
    )
    draft_device: str | None = option(
        None,
        "llama.cpp's; refused: --device is for the drafter, too.",
        *("--gpu-layers-draft", "-ngld", "--n-gpu-layers-draft", "--spec-draft-ngl"),
        *("--device-draft", "-devd", "--spec-draft-device"),
        hidden=True,
    )
    draft_threads: str | None = option(
        None,
        "llama.cpp's; refused: --threads is for the drafter, too.",
        *("--threads-draft", "-td", "--spec-draft-threads"),
        *("--threads-batch-draft", "-tbd", "--spec-draft-threads-batch"),
        hidden=True,
    )
    lookup_cache: str | None = option(
        None,
        "llama.cpp's; refused: earlier answers are kept in memory, by key.",
        *("--lookup-cache-static", "-lcs", "--lookup-cache-dynamic", "-lcd"),
        hidden=True,
    )


def with_peer_flags(options: EngineOptions, flags: PeerFlags) -> tuple[EngineOptions, list[str]]:
    """The options with what these flags ask for, and notes for the user. Raises ConfigError."""
    for field, (name, why) in _REFUSED.items():
        if getattr(flags, field) is not None:
            raise ConfigError(f"{name} are not supported", why)
    idle = {
        "--draft-min": flags.draft_min,
        "--draft-p-min": flags.draft_p_min,
        "--draft-p-split": flags.draft_p_split,
        "--spec-ngram-...": flags.ngram_sizes,
    }
    notes = [f"{name} has no effect: {_MEASURED}" for name, value in idle.items() if value is not None]
    _check_kv_dtype("--cache-type-k-draft", flags.cache_type_k_draft, options.kv_dtype)
    _check_kv_dtype("--cache-type-v-draft", flags.cache_type_v_draft, options.kv_dtype)
    if flags.ctx_size_draft:
        options = replace(options, draft_max_model_len=flags.ctx_size_draft)
    config = _vllm_config(options, flags)
    if config is None:
        return replace(options, speculate=_from_llama(options.speculate, flags.model_draft)), notes
    return _from_vllm(options, config, notes), notes


def _check_kv_dtype(name: str, given: Any, kv_dtype: str) -> None:
    """Raises ConfigError for a type of a drafter's keys or values that is not that of the model's."""
    ours = _KV_DTYPES.get(given, given) if isinstance(given, str) else given
    if ours not in (None, "auto", kv_dtype):
        raise ConfigError(
            f"{name} is {quoted(given)}, and --kv-dtype {kv_dtype}",
            "the keys and values of a drafter lie in its model's blocks and have their type: set --kv-dtype for both",
        )


# -- llama.cpp ---------------------------------------------------------------------------------------------


def _from_llama(speculate: str, model: str | None) -> str:
    """--speculate, or --spec-type in llama.cpp's names, with the model of -md."""
    parts = [part.strip() for part in speculate.split(",")]
    for part in parts:
        if part in _LLAMA_ONLY:
            raise ConfigError(f"--spec-type has {part}", f"not supported; expected some of {', '.join(_LLAMA)}")
    if model is None and not any(part in _LLAMA for part in parts):
        return speculate
    if model is not None and speculate == "auto":
        return _source(model)
    names = list(dict.fromkeys(name for part in parts for name in _LLAMA.get(part, (part,))))
    if model is not None and "mtp" in names and _kind(model) == "assistant":
        names[names.index("mtp")] = "draft"
    needs = next((name for name in names if name in SOURCES), None)
    if needs is None and model is not None:
        raise ConfigError(f"-md {model}, and --spec-type has no drafter that reads it", "add draft-simple, or leave it")
    if needs is not None and model is None:
        raise ConfigError(f"--spec-type {speculate} needs a model", "give -md FILE")
    return ",".join(f"{name}={model}" if name == needs else name for name in names)


def _source(model: str) -> str:
    return f"{'eagle3' if _kind(model) == 'eagle3' else 'draft'}={model}"


def _kind(model: str) -> str:
    """Whether a path is an EAGLE-3 head ("eagle3"), an assistant of Gemma 4 ("assistant"), which both engines call a
    head for multi-token prediction, or a model ("draft"); one that is not on this machine is judged by its name."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        from kvasir.weights.gguf import GGUFFile

        with GGUFFile(path) as file:
            architecture = str(file.metadata.get("general.architecture"))
            return {"eagle3": "eagle3", "gemma4-assistant": "assistant"}.get(architecture, "draft")
    if (path / "config.json").is_file():
        from kvasir.models.config import read_hf_config
        from kvasir.models.eagle3_config import is_eagle3
        from kvasir.models.gemma4_assistant import is_assistant

        config = read_hf_config(path / "config.json")
        return "assistant" if is_assistant(config) else "eagle3" if is_eagle3(config) else "draft"
    return next((kind for kind in ("eagle3", "assistant") if kind in model.lower()), "draft")


# -- vLLM --------------------------------------------------------------------------------------------------


def _vllm_config(options: EngineOptions, flags: PeerFlags) -> dict[str, Any] | None:
    """The object of --speculative-config, or of the flags that stand for some of its keys; None without them."""
    own = {"method": flags.spec_method, "num_speculative_tokens": flags.spec_tokens}
    if flags.speculative_config is not None:
        if options.speculate != "auto" or any(value is not None for value in (flags.model_draft, *own.values())):
            raise ConfigError("--speculative-config and another choice of drafters", "give one of them")
        return _parsed(flags.speculative_config)
    if all(value is None for value in own.values()):
        return None
    if options.speculate != "auto":
        raise ConfigError("--spec-method or --spec-tokens, and --speculate", "give one of them")
    config = {name: value for name, value in {**own, "model": flags.model_draft}.items() if value is not None}
    return config if "method" in config or "model" in config else {"method": "suffix", **config}  # as --speculate auto


def _from_vllm(options: EngineOptions, config: dict[str, Any], notes: list[str]) -> EngineOptions:
    if tuning := [key for key in config if key in _TUNING]:
        notes.append(f"no effect in --speculative-config: {', '.join(tuning)}; {_MEASURED}")
    if unknown := [key for key in config if key not in (*_KEYS, *_TUNING)]:
        expected = f"expected {', '.join(_KEYS)}, or a setting of vLLM's drafters"
        raise ConfigError(f"--speculative-config has {quoted(unknown[0])}", expected)
    speculate = _method(config.get("method"), config.get("model"), notes)
    options = _with_length(options, config.get("max_model_len"), speculate, notes)
    _check_kv_dtype("kv_cache_dtype", config.get("kv_cache_dtype"), options.kv_dtype)
    if config.get("quantization") is not None:
        notes.append(
            "quantization in --speculative-config has no effect: the files say it; --draft-quantize quantizes floats"
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
        raise ConfigError(f"max_model_len of --speculative-config is {quoted(length)}", "expected a number from 1 on")
    if not parse(speculate).weights:
        notes.append(f"max_model_len in --speculative-config has no effect: {speculate} has no weights")
        return options
    return replace(options, draft_max_model_len=length)


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}", 'for example {"method": "ngram"}') from None
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config is not an object", 'for example {"method": "ngram"}')
    return config


def _method(method: Any, model: Any, notes: list[str]) -> str:
    if not isinstance(model, str | None):
        raise ConfigError(f"the model of --speculative-config is {quoted(model)}", "expected a name or a path")
    if method is None and model is None:
        raise ConfigError("--speculative-config has neither method nor model", f"method is one of {', '.join(_VLLM)}")
    if method is None:
        return _source(model or "")
    names = ("mtp",) if isinstance(method, str) and method.endswith("_mtp") else ()
    names = names or (_VLLM.get(method) if isinstance(method, str) else None)
    if names is None:
        raise ConfigError(f"--speculative-config has the method {quoted(method)}", f"expected {', '.join(_VLLM)}")
    if names == ("mtp",) and model is not None and _kind(model) == "assistant":
        return f"draft={model}"
    if names[0] not in SOURCES:
        if model is not None:
            notes.append(f"the model of --speculative-config has no effect: {method} reads no other checkpoint")
        return ",".join(names)
    if not model:
        raise ConfigError(f"{method} needs a model", 'give "model" in --speculative-config')
    return f"{names[0]}={model}"
