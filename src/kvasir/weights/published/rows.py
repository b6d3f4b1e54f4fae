"""What the settings of a quantized checkpoint say about activations and the KV cache, as a message: this engine rounds
rows and caches by its own rules (docs/quantization.md), so it reads these settings but does not follow them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir.errors import ModelFileError, quoted


def scheme_of(settings: Mapping[str, Any]) -> str:
    """The message, "" if the settings have neither. Raises ModelFileError for settings that are no objects."""
    inner = settings.get("quantization") or settings
    inner = inner if isinstance(inner, Mapping) else settings
    parts = []
    if found := sorted(set(_activations(settings, inner))):
        parts.append(f"activations are not quantized by the file's scheme ({', '.join(found)})")
    if cache := _cache(settings, inner):
        parts.append(f"the KV cache is not quantized by the file's scheme ({cache}): --kv-dtype chooses its format")
    return "; ".join(parts)


def _activations(settings: Mapping[str, Any], inner: Mapping[str, Any]) -> Iterator[str]:
    for group in _object(settings, "config_groups").values():
        scheme = group.get("input_activations") if isinstance(group, Mapping) else None
        if isinstance(scheme, Mapping):
            yield _scheme(scheme)
    if isinstance(name := settings.get("activation_scheme"), str):
        yield f"{name[:40]} FP8"
    if str(inner.get("quant_algo", "")).startswith(("FP8", "NVFP4")):
        yield f"static, of {str(inner['quant_algo'])[:40]}"


def _cache(settings: Mapping[str, Any], inner: Mapping[str, Any]) -> str:
    scheme = _object(settings, "kv_cache_scheme")
    if scheme:
        return _scheme(scheme)
    name = inner.get("kv_cache_quant_algo")
    return name[:40] if isinstance(name, str) else ""


def _object(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise ModelFileError(f"config.json: quantization_config: {name} is {quoted(found)}", "expected an object")
    return found


def _scheme(scheme: Mapping[str, Any]) -> str:
    """As in "dynamic 8-bit int per token"."""
    when = "dynamic" if scheme.get("dynamic") else "static"
    kind, strategy = str(scheme.get("type", "int"))[:20], str(scheme.get("strategy", "tensor"))[:20]
    return f"{when} {str(scheme.get('num_bits', 8))[:4]}-bit {kind} per {strategy}"
