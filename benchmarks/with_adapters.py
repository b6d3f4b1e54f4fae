"""What the benchmarks of adapters share: adapters with random numbers, options, an engine, and reports."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks import shapes
from kvasir.cli.machine import machine_facts, software_facts
from kvasir.cli.simulate import report
from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.runner.runner import Runner

TARGETS = {
    "q, v": ("q_proj", "v_proj"),
    "all": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def write_adapter(folder: Path, config: dict[str, Any], targets: Sequence[str], rank: int, seed: int) -> str:
    """A random adapter in bfloat16, as peft writes it."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.tensor_shapes(config):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            a, b = ((rank, shape[1]), (shape[0], rank))
            for part, size, scale in (("A", a, a[1] ** -0.5), ("B", b, 0.02)):
                values = torch.randn(size, generator=draw) * scale
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return str(folder)


def parser(text: str | None, *, shape: str, layers: int | None, quantize: str | None) -> argparse.ArgumentParser:
    """The options of both, with these defaults. text: the module's."""
    found = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--shape", choices=shapes.SHAPES, default=shape)
    found.add_argument("--layers", type=int, default=layers, help="fewer layers, for a quick look")
    found.add_argument("--quantize", choices=("q8", "q4"), default=quantize, help="as of kvasir serve")
    found.add_argument("--users", type=int, default=32)
    found.add_argument("--threads", type=int, help="computing threads")
    found.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    return found


def shape_of(args: argparse.Namespace) -> dict[str, Any]:
    config = {**shapes.SHAPES[args.shape]}
    config["num_hidden_layers"] = args.layers or config["num_hidden_layers"]
    return config


def engine_of(args: argparse.Namespace, model: Path, **options: Any) -> tuple[EngineCore, Runner]:
    given = {"quantize": args.quantize, "threads": args.threads, "max_model_len": 256, "speculate": "off"}
    core = build_core(EngineOptions(model=str(model), **given, **options))
    assert isinstance(core.runner, Runner)
    return core, core.runner


def write_report(args: argparse.Namespace, name: str, facts: dict[str, Any], draw: Callable[[Any], None]) -> None:
    """Writes facts and options, if there is a folder for them."""
    if args.out:
        options = {key: value for key, value in vars(args).items() if isinstance(value, int | str | None)}
        machine = {"machine": machine_facts(), "software": software_facts()}
        report.write(args.out, name, {**machine, **options, **facts}, draw)
