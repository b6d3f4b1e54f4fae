"""The memory that a model would need, from its config.json alone: `kvasir inspect CONFIG` without weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvasir.cli.model_facts import cache_bytes
from kvasir.cli.show import bytes_text, count_text, print_json, print_pairs, print_table
from kvasir.config import EngineOptions
from kvasir.device import available
from kvasir.environment import user_path
from kvasir.errors import ConfigError
from kvasir.parallel import Mesh

# Formats of the weights: name -> dtype of the computation, what `--quantize` is given.
FORMATS = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "q8": ("bfloat16", "q8"),
    "q4": ("bfloat16", "q4"),
}
DEVICES = (1, 2, 4, 8)
CONTEXTS = (4096, 32768)


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Bytes on each of `devices` that a model is split among; the first one's, which has the most.

    weights: in this format. kv_token: keys and values of one more token, in bfloat16, of the layers without a window.
    contexts: of one sequence with so many tokens, with its recurrent states, by its length.
    """

    format: str
    devices: int
    weights: int
    kv_token: int
    contexts: dict[int, int]


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """quantized: the method with which the checkpoint's weights are stored, or None; the needs are without it. reason:
    why the program executor cannot run the model, or ""."""

    architecture: str
    parameters: int
    max_context: int
    quantized: str | None
    reason: str
    needs: tuple[DeviceNeeds, ...]


def config_path(model: str) -> Path | None:
    """The config.json that `model` names: the file, or a folder in which no weights lie beside it. None for others."""
    path = user_path(model)
    if path.suffix == ".json" and path.is_file():
        return path
    if not (path / "config.json").is_file():
        return None
    weights = any(True for pattern in ("*.safetensors", "*.gguf", "*.bin", "*.pt") for _ in path.glob(pattern))
    return None if weights else path / "config.json"


def read_config_facts(path: Path, max_model_len: int | None = None) -> ConfigFacts:
    """Builds the model without weights. Raises UnsupportedModel or ModelFileError if this engine cannot run it,
    ConfigError for a context beyond the model's positions."""
    from kvasir.models.config import read_hf_config
    from kvasir.models.registry import model_class_for
    from kvasir.ops import native
    from kvasir.runner.load import no_attention
    from kvasir.runner.packing import Packer

    config = read_hf_config(path)
    stored = config.pop("quantization_config", None)
    method = stored.get("quant_method", "unknown") if isinstance(stored, dict) else None
    kind: Any = model_class_for(config)
    settings = kind.Config.from_hf(config)
    longest = settings.context_length
    if max_model_len is not None and not 1 <= max_model_len <= longest:
        raise ConfigError(f"max_model_len is {max_model_len}", f"this model has 1 to {longest} positions")
    longest = max_model_len or longest
    contexts = (*(length for length in CONTEXTS if length < longest), longest)
    model = kind(settings)
    reason = native.reason() or no_attention(model)
    parameters = sum(count * prod(shape) for leaf, count in _leaves(model) for shape in leaf.expects().values())
    needs = {}
    for devices in DEVICES:
        for quantize in ("",) if reason else dict.fromkeys(quantize for _, quantize in FORMATS.values()):
            if devices > 1:  # formats are split differently
                model = _split(kind(settings), devices, None if reason else Packer("bfloat16", quantize))
            for name, (dtype, wanted) in FORMATS.items():
                if wanted == quantize:
                    packer = None if reason else Packer(dtype, quantize)
                    needs[name, devices] = _needs(model, name, devices, contexts, packer)
    ordered = tuple(needs[name, devices] for name in FORMATS for devices in DEVICES if (name, devices) in needs)
    return ConfigFacts(kind.__name__, parameters, longest, method, reason, ordered)


def _needs(model: Any, name: str, devices: int, contexts: tuple[int, ...], packer: Any) -> DeviceNeeds:
    from kvasir.layers.kv_layout import cache_groups
    from kvasir.program import cache as programs

    block, spec = EngineOptions("").block_size, model.cache_spec()
    groups = (programs.cache_groups if packer else cache_groups)(spec, block, "bfloat16")
    rows = sum(kind.row_bytes for kind in spec if kind.owns)
    return DeviceNeeds(
        name,
        devices,
        weights=sum(_sizes(model, packer, FORMATS[name][0])),
        kv_token=sum(group.bytes_per_block // block for group in groups if not group.kind.bound),
        contexts={length: rows + cache_bytes(groups, block, length) for length in contexts},
    )


def _split(model: Any, devices: int, packer: Any) -> Any:
    """The model reduced to the first device's shards, as `kvasir.runner.load.split` does with weights."""
    mesh = type("Ranks", (Mesh,), {"size": devices})()

    def segments(linear: Any) -> int:
        reduces = packer and getattr(linear, "reduces", False)
        return packer.segments(linear, "BF16") if reduces else linear.segments

    model.split(mesh, segments)
    return model


def _leaves(model: Any) -> Iterator[tuple[Any, int]]:
    """Every module once, with its count: of a mixture's experts, which may be tens of thousands, one stands for all."""
    from kvasir.layers.moe import MoE

    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(model, 1)]
    for module, count in waiting:
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module, count
        experts = module.experts if isinstance(module, MoE) else []
        if experts:
            held = module.held()
            waiting.append((held[0], count * len(held)))
        apart = set(map(id, experts))
        waiting += ((child, count) for _, child in module.children() if id(child) not in apart)


def _sizes(model: Any, packer: Any, dtype: str) -> Iterator[int]:
    """Bytes of each tensor, for a checkpoint in bfloat16."""
    from kvasir.layers.places import SizePlace, no_memory

    stored = "F32" if dtype == "float32" else "BF16"
    nowhere = SizePlace(4 if dtype == "float32" else 2)
    for leaf, count in _leaves(model):
        for name, shape in leaf.expects().items():
            size = packer.nbytes(leaf, name, stored) if packer else None
            yield count * (leaf.put(name, no_memory(shape), nowhere).nbytes if size is None else size)


# --- shown ------------------------------------------------------------------------------------------------


def run(path: Path, max_model_len: int | None, json: bool) -> None:
    """Prints the facts. Raises as `read_config_facts`."""
    facts = read_config_facts(path, max_model_len)
    if json:
        return print_json(as_dict(path, facts))
    free = available("cpu")
    print_pairs(
        [
            ("config", path), ("runs as", facts.architecture), ("parameters", count_text(facts.parameters)),
            ("context", f"{facts.max_context} tokens"), ("this machine", f"{bytes_text(free)} free"),
            *([("weights", f"stored in {facts.quantized}; the table is without it")] if facts.quantized else []),
            *([("executor", f"eager: {facts.reason}")] if facts.reason else []),
        ]
    )  # fmt: skip
    lengths = list(facts.needs[0].contexts)
    rows = (
        (
            need.format, need.devices, bytes_text(need.weights), bytes_text(need.kv_token),
            *(bytes_text(need.weights + need.contexts[length]) for length in lengths),
        )
        for need in facts.needs
    )  # fmt: skip
    columns = ("weights in", ">devices", ">weights", ">KV per token", *(f">with {length} tokens" for length in lengths))
    print_table(columns, rows, "Memory on each device or rank, for one sequence with keys and values in bfloat16")


def as_dict(path: Path, facts: ConfigFacts) -> dict[str, Any]:
    """The facts as plain values; sizes in bytes."""
    return {
        "config": str(path),
        "class": facts.architecture,
        "parameters": facts.parameters,
        "max_context": facts.max_context,
        "quantized": facts.quantized,
        "executor": "eager" if facts.reason else "program",
        "reason": facts.reason,
        "memory": [
            {
                "format": need.format,
                "devices": need.devices,
                "weights": need.weights,
                "kv_per_token": need.kv_token,
                "contexts": [
                    {"tokens": length, "kv": size, "total": need.weights + size}
                    for length, size in need.contexts.items()
                ],
            }
            for need in facts.needs
        ],
    }
