"""Chooses how to read a quantized checkpoint from the settings in its config, and refuses settings without code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.json_file import read_json_object
from kvasir.weights.published import bitnet, bitsandbytes, experts_mxfp4, grouped, hqq, mlx, scaled, torchao
from kvasir.weights.published.rows import row_scheme, scheme_of
from kvasir.weights.published.view import Decoded, DecodedView
from kvasir.weights.source import WeightSource

_NAMES = {"quantization_config", "compression_config", "quantization"}
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8", "MIXED_PRECISION", "FP8_PB_WO")
_BITS = (2, 3, 4, 8)
_MAX_BYTES = 1 << 24


def unquantized(config: Mapping[str, Any], source: WeightSource) -> tuple[dict[str, Any], WeightSource]:
    """The config and the weights as if the checkpoint were not quantized; unchanged if it is not.

    Raises UnsupportedModel for a method or a setting without code, ModelFileError for settings or tensors that do not
    fit together.
    """
    settings = next((config[name] for name in sorted(_NAMES) if config.get(name)), None)
    plain = {name: value for name, value in config.items() if name not in _NAMES}
    if settings is None:
        return dict(config), source
    if not isinstance(settings, Mapping):
        raise ModelFileError(f"config.json: quantization_config is {quoted(settings)}", "expected an object")
    method = settings.get("quant_method") or ("mlx" if "group_size" in settings and "bits" in settings else None)
    if method not in _METHODS:
        raise UnsupportedModel(
            f"config.json: weights quantized by {quoted(method)} are not supported",
            f"supported: {', '.join(_METHODS)}; or use a GGUF file of the model",
        )
    if method == "bitnet" and config.get("model_type") not in bitnet.FAMILIES:
        raise UnsupportedModel(
            f"config.json: matrices of BitNet in a {quoted(config.get('model_type'))}",
            f"supported for the model types {', '.join(bitnet.FAMILIES)}",
        )
    tensors, dropped = _METHODS[method](settings, source)
    found = list(tensors)
    followed = sum(tensor.inputs is not None and tensor.inputs.rounding != "" for tensor in found)
    return plain, DecodedView(source, found, str(method), dropped, scheme_of(settings, followed))


def with_own_file(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the settings that ModelOpt writes to a file beside it, unless it has settings itself. Raises
    ModelFileError for a malformed file."""
    path = folder / "hf_quant_config.json"
    if any(config.get(name) for name in _NAMES) or not path.is_file():
        return dict(config)
    return {**config, "quantization_config": {"quant_method": "modelopt", **read_json_object(path, _MAX_BYTES)}}


def with_rounded_rows(source: WeightSource, architecture: str) -> WeightSource:
    """The weights of a GGUF file under Hugging Face's names. Ternary matrices of a BitNet get the int8 rows that they
    were trained with."""
    return DecodedView(source, bitnet.read_gguf(source), architecture) if architecture == "bitnet" else source


_Read = tuple[Iterable[Decoded], str]


def _choice(settings: Mapping[str, Any], name: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = settings.get(name, default)
    if value not in allowed:
        raise UnsupportedModel(
            f"config.json: quantization_config: {name} is {quoted(value)}",
            f"supported: {', '.join(map(str, allowed))}",
        )
    return value


def _block(value: Any) -> tuple[int, int]:
    if value is None:
        return 128, 128
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 1 <= n <= 1 << 16 for n in value):
        raise ModelFileError(f"config.json: quantization_config: blocks of {quoted(value)}", "expected two sizes")
    return value[0], value[1]


def _fp8(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    _choice(settings, "fmt", ("e4m3", "float8_e4m3fn", None), None)
    _choice(settings, "scale_fmt", ("ue8m0", "float", None), None)
    return scaled.read(source, _block(settings.get("weight_block_size")), row_scheme(settings)), scaled.DROPPED


def _compressed(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    if settings.get("transform_config") or (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise UnsupportedModel(
            "config.json: quantization_config: transforms or sparse weights", "supported: compressed-tensors without"
        )
    blocks = set()
    for group in (settings.get("config_groups") or {}).values():
        weights = (group.get("weights") if isinstance(group, Mapping) else None) or {}
        if weights.get("strategy") == "block":
            blocks.add(_block(weights.get("block_structure")))
    if len(blocks) > 1:
        raise UnsupportedModel("config.json: quantization_config: blocks of several shapes", "supported: one shape")
    return scaled.read(source, next(iter(blocks), (128, 128)), row_scheme(settings)), scaled.DROPPED


def _modelopt(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    inner = settings.get("quantization") or settings
    if not isinstance(inner, Mapping):
        raise ModelFileError(f"quantization is {quoted(inner)}", "expected an object with quant_algo")
    _choice(inner, "quant_algo", _ALGORITHMS, "FP8")
    return scaled.read(source, (128, 128), row_scheme(settings)), scaled.DROPPED


def _mxfp4(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    return experts_mxfp4.read(source), ""


def _gptq(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    bits = _choice(settings, "bits", _BITS, 4)
    form = _choice(settings, "checkpoint_format", ("gptq", "gptq_v2", "marlin", None), "gptq")
    if form == "marlin" or settings.get("is_marlin_format"):
        return _marlin(settings, source)
    rules = settings.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise ModelFileError(f"config.json: quantization_config: dynamic is {quoted(rules)}", "expected an object")
    for rule in rules.values():
        _choice(rule if isinstance(rule, Mapping) else {}, "bits", _BITS, bits)
    # What the rules change shows in the tensors of a module: their shapes, zeros and groups, or plain weights.
    return grouped.read_gptq(source, None if rules else bits, form != "gptq_v2"), ""


def _marlin(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    _choice(settings, "bits", (4,), 4)
    _choice(settings, "desc_act", (False, None), False)
    return grouped.read_marlin(source), r".*\.workspace"


def _awq(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    _choice(settings, "bits", (4,), 4)
    version = settings.get("version")
    version = version.lower() if isinstance(version, str) else version
    _choice({"version": version}, "version", ("gemm", "gemv", None), None)
    if version != "gemv":
        return grouped.read_awq(source), ""
    group = settings.get("group_size", settings.get("q_group_size", 128))
    if type(group) is not int or not (group == -1 or 1 <= group <= 1 << 16):
        raise ModelFileError(f"config.json: quantization_config: group_size is {quoted(group)}", "expected -1 or more")
    return grouped.read_awq_gemv(source, group), ""


def _hqq(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    return hqq.read(source), ""


def _torchao(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    return torchao.read(source), ""


def _bitnet(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    kind = _choice(settings, "linear_class", ("bitlinear", "autobitlinear"), "bitlinear")
    mode = _choice(settings, "quantization_mode", ("offline", "online"), "offline")
    _choice(settings, "use_rms_norm", (False, None), False)
    kept = settings.get("modules_to_not_convert") or []
    if not isinstance(kept, list) or not all(isinstance(name, str) and name for name in kept):
        raise ModelFileError(
            f"config.json: quantization_config: modules_to_not_convert is {quoted(kept)}", "expected a list of names"
        )
    if kind == "autobitlinear" and mode == "online":
        return bitnet.read_online(source, kept), ""
    return bitnet.read(source, inverse=kind == "bitlinear"), ""


def _bitsandbytes(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    threshold = settings.get("llm_int8_threshold", 6.0)
    if type(threshold) not in (int, float) or not (threshold == 0 or 1e-30 < threshold < 1e30):
        raise ModelFileError(
            f"config.json: quantization_config: llm_int8_threshold is {quoted(threshold)}", "expected 0 or more"
        )
    return bitsandbytes.read(source, float(threshold)), bitsandbytes.DROPPED


def _mlx(settings: Mapping[str, Any], source: WeightSource) -> _Read:
    def of(stem: str) -> mlx.Settings:
        own = settings.get(stem)
        found = {**settings, **(own if isinstance(own, Mapping) else {})}
        bits, group = found.get("bits"), found.get("group_size")
        if bits not in (2, 3, 4, 5, 6, 8) or group not in (16, 32, 64, 128):
            raise UnsupportedModel(
                f"config.json: quantization of {stem}: {quoted(bits)} bits in groups of {quoted(group)}",
                "supported: 2, 3, 4, 5, 6 or 8 bits in groups of 16, 32, 64 or 128",
            )
        return bits, group, _choice(found, "mode", mlx.MODES, "affine")

    return mlx.read(source, of), ""


_METHODS = {
    "awq": _awq,
    "bitnet": _bitnet,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "hqq": _hqq,
    "marlin": _marlin,
    "mlx": _mlx,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
