"""What a quantized checkpoint's settings say about activations and the KV cache: the schemes of activations that
kernels follow, and a message about the others (docs/quantization.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kvasir.errors import ModelFileError, quoted

_NOT_FOLLOWED = "are not quantized by the file's scheme"


class RowScheme(NamedTuple):
    """How all matrices' rows are rounded: to "int8" or "fp8", by scales in the file (is_static) or dynamic ones, of a
    row or of `group` columns."""

    rounding: str
    is_static: bool
    group: int = 0


def row_scheme(settings: Mapping[str, Any]) -> RowScheme | None:
    """The scheme, if kernels can follow it and all groups have the same. Raises ModelFileError for settings that are no
    objects."""
    inner = settings.get("quantization") or settings
    if isinstance(inner, Mapping) and inner.get("quant_algo") == "FP8":
        return RowScheme("fp8", True)
    if settings.get("quant_method") == "fp8":
        block = settings.get("weight_block_size")
        if settings.get("activation_scheme") == "static":
            return RowScheme("fp8", True)
        is_blocks = settings.get("activation_scheme") == "dynamic" and isinstance(block, list) and block[1:] == [128]
        return RowScheme("fp8", False, 128) if is_blocks else None
    groups = _object(settings, "config_groups").values()
    schemes = {_followed(group.get("input_activations") if isinstance(group, Mapping) else None) for group in groups}
    return schemes.pop() if len(schemes) == 1 else None


def _followed(scheme: Any) -> RowScheme | None:
    if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8 or scheme.get("symmetric") is not True:
        return None
    rounding = {"int": "int8", "float": "fp8"}.get(str(scheme.get("type")))
    strategy, dynamic, group = scheme.get("strategy"), scheme.get("dynamic"), scheme.get("group_size")
    if rounding and strategy == "tensor" and dynamic is False:
        return RowScheme(rounding, True)
    if rounding and strategy == "token" and dynamic is True:
        return RowScheme(rounding, False)
    if rounding == "fp8" and strategy == "group" and dynamic is True and group == 128:
        return RowScheme("fp8", False, 128)
    return None


def scheme_of(settings: Mapping[str, Any], followed: int = 0) -> str:
    """The message, "" if the settings have neither. followed: matrices whose rows are rounded by the scheme. Raises
    ModelFileError for settings that are no objects."""
    inner = settings.get("quantization") or settings
    inner = inner if isinstance(inner, Mapping) else settings
    parts = []
    if found := sorted(set(_activations(settings, inner))):
        does = f"are quantized by the file's scheme for {followed} of them" if followed else _NOT_FOLLOWED
        parts.append(f"activations {does} ({', '.join(found)})")
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
    if settings.get("quant_method") == "bitsandbytes" and settings.get("load_in_8bit"):
        yield "LLM.int8"
    if str(inner.get("quant_algo", "")).startswith(("FP8", "NVFP4", "MXFP8")):
        when = "dynamic" if inner["quant_algo"] == "MXFP8" else "static"
        yield f"{when}, of {str(inner['quant_algo'])[:40]}"


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
