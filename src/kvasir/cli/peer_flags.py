"""Flags of other engines for drafters, and how they map to ours: vLLM's --speculative-config, and llama.cpp's; those
for adapters are in `peer_lora`, vLLM's for engines that exchange blocks in `peer_transfer`.

Settings that only tune how a drafter of that engine guesses have no effect here, which a note says: how much is drafted
follows from measurements, and no draft changes a token. Settings that would place a drafter elsewhere than its model
are refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from kvasir.cli.peer_lora import LoraFlags, with_lora_flags
from kvasir.cli.peer_transfer import FLAG, with_transfer_config
from kvasir.config import EngineOptions, option
from kvasir.engine.vllm_drafters import MEASURED, check_kv_dtype, from_vllm, kind_of, source_of
from kvasir.errors import ConfigError
from kvasir.speculation import SOURCES

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
    "draft-dflash": ("dflash",),
    "draft-dspark": ("dflash",),
    "draft-mtp": ("mtp",),
}
_NGRAMS = ("simple", "map-k", "map-k4v")
# Refused fields of PeerFlags -> the flag as llama.cpp prints it, and why.
_REFUSED = {
    "draft_device": ("-ngld and -devd", "a drafter computes where its model does; --device is for both"),
    "draft_threads": ("-td and -tbd", "a drafter has its model's threads; --threads is for both"),
    "lookup_cache": ("-lcs and -lcd", "earlier answers are kept in memory, by key: --speculate suffix"),
}


@dataclass(frozen=True, slots=True)
class PeerFlags(LoraFlags):
    """Flags of engine commands besides those of EngineOptions."""

    speculative_config: str | None = option(
        None,
        'As vLLM takes it, for example {"method": "ngram", "num_speculative_tokens": 5}: method, model, '
        "num_speculative_tokens, max_model_len.",
        "--speculative-config",
        "-sc",
    )
    kv_transfer_config: str | None = option(
        None, 'As vLLM takes it, for example {"kv_role": "kv_producer"}: kv_role, kv_ip, kv_port.', FLAG
    )
    spec_method: str | None = option(None, "vLLM's method alone, as in --speculative-config.", "--spec-method")
    spec_tokens: int | None = option(None, "vLLM's num_speculative_tokens alone.", "--spec-tokens")
    model_draft: str | None = option(
        None,
        "As llama.cpp and vLLM take it: a draft model, an EAGLE-3 head or a DFlash drafter.",
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
    notes = [f"{name} has no effect: {MEASURED}" for name, value in idle.items() if value is not None]
    check_kv_dtype("--cache-type-k-draft", flags.cache_type_k_draft, options.kv_dtype)
    check_kv_dtype("--cache-type-v-draft", flags.cache_type_v_draft, options.kv_dtype)
    if flags.ctx_size_draft:
        options = replace(options, draft_max_model_len=flags.ctx_size_draft)
    options = with_transfer_config(with_lora_flags(options, flags, notes), flags.kv_transfer_config, notes)
    config = _vllm_config(options, flags)
    if config is None:
        return replace(options, speculate=_from_llama(options.speculate, flags.model_draft)), notes
    return from_vllm(options, config, notes), notes


# -- llama.cpp ---------------------------------------------------------------------------------------------


def _from_llama(speculate: str, model: str | None) -> str:
    """--speculate, or --spec-type in llama.cpp's names, with the model of -md."""
    parts = [part.strip() for part in speculate.split(",")]
    for part in parts:
        if part.startswith("draft-") and part not in _LLAMA:
            raise ConfigError(f"--spec-type has {part}", f"not supported; expected some of {', '.join(_LLAMA)}")
    if model is None and not any(part in _LLAMA for part in parts):
        return speculate
    if model is not None and speculate == "auto":
        return source_of(model)
    names = list(dict.fromkeys(name for part in parts for name in _LLAMA.get(part, (part,))))
    if model is not None and "mtp" in names and kind_of(model) == "assistant":
        names[names.index("mtp")] = "draft"
    needs = next((name for name in names if name in SOURCES), None)
    if needs is None and model is not None:
        raise ConfigError(f"-md {model}, and --spec-type has no drafter that reads it", "add draft-simple, or leave it")
    if needs is not None and model is None:
        raise ConfigError(f"--spec-type {speculate} needs a model", "give -md FILE")
    return ",".join(f"{name}={model}" if name == needs else name for name in names)


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


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--speculative-config is not JSON: {error}", 'for example {"method": "ngram"}') from None
    if not isinstance(config, dict):
        raise ConfigError("--speculative-config is not an object", 'for example {"method": "ngram"}')
    return config
