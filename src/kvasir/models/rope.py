"""Reads the rotary embedding's settings from a config, in the old format and in the new.

Old (`rope_theta` next to `rope_scaling`, with `type` or `rope_type`) and new (transformers 5: one `rope_parameters`
that also holds theta) give the same pair of theta and `RopeScaling`. This module reads and checks the numbers and fills
in the published defaults; `kvasir.layers.rope` applies them to the frequencies.

Sources: YaRN, arXiv:2309.00071; LongRoPE, arXiv:2402.13753; the Llama 3.1 model card; transformers'
`modeling_rope_utils` for names and defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.layers.elementary import log
from kvasir.layers.module import Take
from kvasir.layers.rope import KINDS, RopeScaling
from kvasir.models.config import MAX_HEAD_DIM, MAX_POSITIONS, Fields, is_number

_KNOWN_KEYS = """
    type rope_type rope_theta factor original_max_position_embeddings finetuned attention_factor beta_fast
    beta_slow mscale mscale_all_dim truncate low_freq_factor high_freq_factor partial_rotary_factor factors
    short_factor long_factor short_mscale long_mscale
    """


def read_rope(
    f: Fields, max_position: int, default_theta: float = 10000.0, *, partial: bool = False
) -> tuple[float, RopeScaling]:
    """The rotary base theta and the scaling. partial: whether only a part of a head may be rotated.

    Raises ModelFileError for bad values, UnsupportedModel for an unknown kind or setting.
    """
    new, old = f.get("rope_parameters"), f.get("rope_scaling")
    values = new or old or {}
    if not isinstance(values, Mapping):
        raise ModelFileError(f"{f.where}: rope_scaling is {quoted(values)}", "expected an object or null")
    inner = Fields(values, f"{f.where}: {'rope_parameters' if new else 'rope_scaling'}")
    theta = f.number("rope_theta", 1.0, 1e12, default_theta)
    theta = inner.number("rope_theta", 1.0, 1e12, theta)
    if not partial:
        for source in (f, inner):
            source.expect("partial_rotary_factor", 1.0)
    original = f.get("original_max_position_embeddings")  # the top-level field takes precedence, as in transformers
    if original is not None:
        inner.values = {**values, "original_max_position_embeddings": original}
    return theta, _read_scaling(inner, max_position)


def pairs(head_dim: int, rotary_dim: int) -> tuple[int, ...]:
    """The order of a head's dimensions in which neighbouring pairs lie half the rotated part apart."""
    return *range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, head_dim)


def halves(attn: str, head_dim: int, rotary_dim: int) -> dict[str, Take]:
    """Name table entries of q and k for a family whose rotary embedding turns neighbouring pairs of dimensions: their
    rows, reordered so that a head's first and second half are the pairs. Scores do not change."""
    order = pairs(head_dim, rotary_dim)
    return {f"layers.*.attn.qkv.{part}": Take(f"{attn}{part}_proj", order=order) for part in "qk"}


def read_rotary_share(f: Fields) -> float:
    """The fraction of a head's dimensions that is rotated. Call it after `read_rope`. Raises ModelFileError."""
    inner = Fields(f.get("rope_parameters") or f.get("rope_scaling") or {}, f.where)
    return inner.number("partial_rotary_factor", 0.0, 1.0, f.number("partial_rotary_factor", 0.0, 1.0, 1.0))


def read_score_growth(f: Fields) -> float:
    """The factor of attention scores that DeepSeek-V2 adds to YaRN: (0.1 mscale_all_dim ln(factor) + 1)^2, 1 without
    these fields. Call it after `read_rope`."""
    inner = Fields(f.get("rope_parameters") or f.get("rope_scaling") or {}, f.where)
    kind = inner.get("rope_type") or inner.get("type") or "default"
    weight = inner.number("mscale_all_dim", 0.0, 1e3, 0.0)
    if kind == "default" or not weight:
        return 1.0
    factor = inner.number("factor", 1.0, 1e6)
    return (0.1 * weight * log(factor) + 1.0) ** 2 if factor > 1.0 else 1.0


def _read_scaling(f: Fields, max_position: int) -> RopeScaling:
    kind = f.get("rope_type") or f.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # LongRoPE's original name
    if kind not in KINDS:
        raise UnsupportedModel(
            f"{f.where}: the rope kind {quoted(kind)} is not supported", f"supported: {', '.join(KINDS)}"
        )
    if kind != "longrope" and (f.get("short_factor") or f.get("long_factor")):
        raise UnsupportedModel(f"{f.where}: short_factor and long_factor of the rope kind {quoted(kind)}",
                               "they are supported only for longrope")  # fmt: skip
    unknown = sorted(set(f.values).difference(_KNOWN_KEYS.split()))
    if unknown:
        raise UnsupportedModel(f"{f.where}: {quoted(unknown[0])} is unknown", "rope settings are never ignored")
    if kind == "default":
        return RopeScaling()
    if kind == "factors":
        return RopeScaling(kind, factors=_read_factors(f, "factors"))
    original = f.integer("original_max_position_embeddings", 1, MAX_POSITIONS, max_position)
    if kind == "yarn":
        return _read_yarn(f, original, max_position)
    if kind == "longrope":
        return _read_longrope(f, original, max_position)
    factor = f.number("factor", 1.0, 1e6)
    if kind == "llama3":
        return _read_llama3(f, factor, original)
    return RopeScaling(kind, factor)


def _read_llama3(f: Fields, factor: float, original: int) -> RopeScaling:
    low = f.number("low_freq_factor", 1e-6, 1e6)
    high = f.number("high_freq_factor", 1e-6, 1e6)
    if high < low:
        raise ModelFileError(f"{f.where}: high_freq_factor {high} is below low_freq_factor {low}")
    return RopeScaling("llama3", factor, original, low_freq_factor=low, high_freq_factor=high)


def _read_yarn(f: Fields, original: int, max_position: int) -> RopeScaling:
    factor = f.number("factor", 1.0, 1e6, max(1.0, max_position / original))
    return RopeScaling(
        "yarn",
        factor,
        original,
        beta_fast=f.number("beta_fast", 0.0, 1e6, 0.0) or 32.0,
        beta_slow=f.number("beta_slow", 0.0, 1e6, 0.0) or 1.0,
        attention_factor=f.number("attention_factor", 1e-6, 1e6, _yarn_attention_factor(f, factor)),
        truncate=f.flag("truncate", True),
    )


def _read_longrope(f: Fields, original: int, max_position: int) -> RopeScaling:
    """LongRoPE's settings, with the long factors if the model has positions beyond the original ones."""
    long = _read_factors(f, "long_factor")
    factor = f.number("factor", 1e-6, 1e6, max_position / original)
    attention = math.sqrt(1 + log(factor) / log(original)) if factor > 1.0 < original else 1.0
    return RopeScaling(
        "longrope",
        factor,
        original,
        attention_factor=f.number("short_mscale", 1e-6, 1e6, f.number("attention_factor", 1e-6, 1e6, attention)),
        factors=_read_factors(f, "short_factor"),
        long_factors=long if max_position > original else (),
        long_attention_factor=f.number("long_mscale", 1e-6, 1e6, 0.0) if max_position > original else 0.0,
    )


def _yarn_attention_factor(f: Fields, factor: float) -> float:
    """YaRN's 0.1 ln(factor) + 1, or DeepSeek's ratio of two such terms if both mscale fields are given."""

    def grown(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0

    mscale, all_dim = f.number("mscale", 0.0, 1e3, 0.0), f.number("mscale_all_dim", 0.0, 1e3, 0.0)
    return grown(mscale) / grown(all_dim) if mscale and all_dim else grown(1.0)


def _read_factors(f: Fields, name: str) -> tuple[float, ...]:
    values: Any = f.get(name)
    if not isinstance(values, list) or not 0 < len(values) <= MAX_HEAD_DIM:
        raise ModelFileError(f"{f.where}: {name} is not a list of at most {MAX_HEAD_DIM} numbers")
    if not all(is_number(v) and 0.1 <= v < 1e6 for v in values):
        raise ModelFileError(f"{f.where}: {name} holds a value outside [0.1, 1e6)")
    return tuple(float(v) for v in values)
