"""Flags of other engines for drafters, and how they map to ours: vLLM's --speculative-config, and llama.cpp's.

Settings that only tune how a drafter of that engine guesses have no effect here, which a note says: how much is drafted
follows from measurements, and no draft changes a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvasir.config import EngineOptions, option
from kvasir.errors import ConfigError, quoted
from kvasir.speculation import MAX_DRAFTED, SOURCES

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
    *("attention_backend", "kv_cache_dtype", "max_model_len", "speculative_token_tree", "disable_by_batch_size"),
    *("num_speculative_tokens_per_batch_size", "enable_adaptive_verification", "draft_sample_method"),
    *("rejection_sample_method", "use_heterogeneous_vocab", "quantization"),
)
_MEASURED = "how much is drafted follows from measurements"
_KEYS = ("method", "model", "num_speculative_tokens")


@dataclass(frozen=True, slots=True)
class PeerFlags:
    """Flags of engine commands besides those of EngineOptions."""

    speculative_config: str | None = option(
        None,
        'As vLLM takes it, for example {"method": "ngram", "num_speculative_tokens": 5}: method, model, '
        "num_speculative_tokens.",
        "--speculative-config",
        "-sc",
    )
    model_draft: str | None = option(
        None,
        "As llama.cpp takes it: a draft model or an EAGLE-3 head.",
        "--model-draft",
        "-md",
        "--spec-draft-model",
    )
    draft_min: int | None = option(
        None, "llama.cpp's; no effect.", "--draft-min", "--draft-n-min", "--spec-draft-n-min"
    )
    draft_p_min: float | None = option(None, "llama.cpp's; no effect.", "--draft-p-min", "--spec-draft-p-min")


def with_peer_flags(options: EngineOptions, flags: PeerFlags) -> tuple[EngineOptions, list[str]]:
    """The options with what these flags ask for, and notes for the user. Raises ConfigError."""
    notes = [
        f"{name} has no effect: {_MEASURED}"
        for name, value in (("--draft-min", flags.draft_min), ("--draft-p-min", flags.draft_p_min))
        if value is not None
    ]
    if flags.speculative_config is None:
        return replace(options, speculate=_from_llama(options.speculate, flags.model_draft)), notes
    if options.speculate != "auto" or flags.model_draft is not None:
        raise ConfigError("--speculative-config and another choice of drafters", "give one of them")
    return _from_vllm(options, flags.speculative_config, notes), notes


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
        return f"{_kind(model)}={model}"
    names = list(dict.fromkeys(name for part in parts for name in _LLAMA.get(part, (part,))))
    needs = next((name for name in names if name in SOURCES), None)
    if needs is None and model is not None:
        raise ConfigError(f"-md {model}, and --spec-type has no drafter that reads it", "add draft-simple, or leave it")
    if needs is not None and model is None:
        raise ConfigError(f"--spec-type {speculate} needs a model", "give -md FILE")
    return ",".join(f"{name}={model}" if name == needs else name for name in names)


def _kind(model: str) -> str:
    """Whether a path is an EAGLE-3 head or a draft model; one that is not on this machine is judged by its name."""
    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        from kvasir.weights.gguf import GGUFFile

        with GGUFFile(path) as file:
            return "eagle3" if file.metadata.get("general.architecture") == "eagle3" else "draft"
    if (path / "config.json").is_file():
        from kvasir.models.config import read_hf_config
        from kvasir.models.eagle3_config import is_eagle3

        return "eagle3" if is_eagle3(read_hf_config(path / "config.json")) else "draft"
    return "eagle3" if "eagle3" in model.lower() else "draft"


# -- vLLM --------------------------------------------------------------------------------------------------


def _from_vllm(options: EngineOptions, text: str, notes: list[str]) -> EngineOptions:
    config = _parsed(text)
    if tuning := [key for key in config if key in _TUNING]:
        notes.append(f"no effect in --speculative-config: {', '.join(tuning)}; {_MEASURED}")
    if unknown := [key for key in config if key not in (*_KEYS, *_TUNING)]:
        expected = f"expected {', '.join(_KEYS)}, or a setting of vLLM's drafters"
        raise ConfigError(f"--speculative-config has {quoted(unknown[0])}", expected)
    speculate = _method(config.get("method"), config.get("model"), notes)
    most = config.get("num_speculative_tokens")
    if most is None:
        return replace(options, speculate=speculate)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ConfigError(f"num_speculative_tokens is {quoted(most)}", "expected a number from 1 on")
    if most > MAX_DRAFTED:
        notes.append(f"num_speculative_tokens is {most}; at most {MAX_DRAFTED} are drafted")
    return replace(options, speculate=speculate, draft_max=min(most, MAX_DRAFTED))


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
        return f"{_kind(model or '')}={model}"
    names = ("mtp",) if isinstance(method, str) and method.endswith("_mtp") else ()
    names = names or (_VLLM.get(method) if isinstance(method, str) else None)
    if names is None:
        raise ConfigError(f"--speculative-config has the method {quoted(method)}", f"expected {', '.join(_VLLM)}")
    if names[0] not in SOURCES:
        if model is not None:
            notes.append(f"the model of --speculative-config has no effect: {method} reads no other checkpoint")
        return ",".join(names)
    if not model:
        raise ConfigError(f"{method} needs a model", 'give "model" in --speculative-config')
    return f"{names[0]}={model}"
