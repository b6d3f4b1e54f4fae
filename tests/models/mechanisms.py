"""What a family's model consists of, and the memory of its keys and values: for the page of supported models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from kvasir.models.registry import MODELS, model_class_for
from tests.models.families import FAMILIES, config_of
from tests.models.test_encoders import ENCODERS

# By the name of a cache kind, of a layer's class or one of its bases, or of a layer's attribute.
MECHANISMS = {
    "window": "sliding window",
    "around": "attention within a distance",
    "latent": "latent attention",
    "GatedAttention": "gated attention",
    "GatedDelta": "delta rule",
    "ShortConvolution": "short convolution",
    "Mamba": "Mamba",
    "Mamba2": "Mamba 2",
    "TimeMix": "RWKV-7",
    "MoE": "experts",
    "SharedMoE": "shared expert",
    "SoftCap": "soft caps",
    "Positions": "relative positions",
    "PositionTable": "learned positions",
    "Encoder": "bidirectional",
    ".sinks": "attention sinks",
    ".q_norm": "q and k norms",
}
# What transformers' defaults lack, from DeepSeek-V2-Lite, dots.llm1, GLM-4.5-Air and Zamba2-2.7B.
SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "zamba2": {"n_mamba_heads": 80, "mamba_headdim": 64},
}


def facts_of(family: str) -> tuple[str, str]:
    """(mechanisms of the family's test models, MiB of keys and values in bfloat16 per 1,000 tokens for the sizes that
    transformers has by default or, if it lacks the family, the reader here); "-" where there are none."""
    tiny = [config_of(name) for name, config in FAMILIES.items() if config.get("model_type") == family]
    tiny += [config for config in ENCODERS.values() if config["model_type"] == family]
    models = [_built(family, config) for config in tiny] or [_built(family, SIZES.get(family, {}))]
    names = {MECHANISMS[name] for model in models if model for name in _names(model) if name in MECHANISMS}
    return ", ".join(sorted(names)) or "-", _memory(_built(family, SIZES.get(family, {})))


def _memory(model: Any) -> str:
    if model is None or "generate" not in {task.value for task in model.tasks}:
        return "-"
    growing = [kind for kind in model.cache_spec() if kind.owns and kind.heads and not kind.forgets]
    numbers = sum(kind.key_dim if kind.name == "latent" else kind.width for kind in growing)
    return f"{2 * 1000 * numbers / 2**20:.0f}"


def _names(model: Any) -> Iterator[str]:
    yield from (kind.name for kind in model.cache_spec() if kind.owns)
    for module in (model, *(module for _, module in model.walk())):
        yield from (base.__name__ for base in type(module).__mro__)
        yield from (name for name in MECHANISMS if name[0] == "." and getattr(module, name[1:], None) is not None)


def _built(family: str, fields: Mapping[str, Any]) -> Any:
    """The family's model with these fields, without weights; None if a default config describes no model."""
    from transformers import CONFIG_MAPPING, AutoConfig

    given = {name: value for name, value in deepcopy(dict(fields)).items() if name != "model_type"}
    try:
        known = family in CONFIG_MAPPING
        config = AutoConfig.for_model(family, **given).to_dict() if known else {**given, "model_type": family}
        kind = model_class_for({**config, "architectures": [MODELS[family][2][0]]})
        return kind(kind.Config.from_hf(config))  # type: ignore[attr-defined]
    except Exception:
        return None
