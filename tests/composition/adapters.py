"""Random adapters for the models of the matrix, in peft's form, by the names of their checkpoints."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.layers.norm import LayerNorm, RMSNorm
from kvasir.lora.peft import WEIGHTS
from kvasir.lora.targets import HEAD, Place, Targets
from kvasir.runner.load import open_checkpoint
from kvasir.weights.find import find_model
from tests.composition import models
from tests.lora.made import empty, write_peft

RANK = 8
IDS = list(range(40, 120))  # tokens of which many prompts have some
Tensors = dict[str, np.ndarray]


@cache
def on_linears(model: str, variant: str) -> str:
    """A folder: pairs on all linear layers but those of experts, as peft's "all-linear" has it. variant: its name in
    the matrix, which decides the numbers."""
    made = _Made(model, variant)
    names = [name for name, places in made.matrices() if not made.is_head(places) and not made.is_expert(places)]
    return made.write({k: t for name in names for k, t in made.pair(name).items()}, target_modules=names)


@cache
def of_everything(model: str, variant: str) -> str:
    """A folder: DoRA with biases on all linear layers, those of experts, the router and the head; and another table
    and norm."""
    made = _Made(model, variant)
    tensors: Tensors = {}
    names = [name for name, _ in made.matrices()]
    for name in names:
        tensors |= made.pair(name) | made.vectors(name)
    table, norm = made.table(), made.norm()
    tensors |= made.table_pair(table) | made.saved(norm)
    return made.write(
        tensors, target_modules=[*names, table], modules_to_save=[norm], use_dora=True, lora_bias=True
    )  # fmt: skip


@cache
def of_replacements(model: str, variant: str) -> str:
    """A folder: another head and rows of tokens, and pairs on linear layers and on the stacks of experts."""
    made = _Made(model, variant)
    names = [name for name, places in made.matrices() if not made.is_head(places) and not made.is_expert(places)]
    heads = [name for name, places in made.matrices() if made.is_head(places)]
    table, stacks = made.table(), made.stacks()
    tensors = {k: t for name in names for k, t in made.pair(name).items()} | made.rows(table) | made.stacked(stacks)
    for name in heads:
        tensors |= made.matrix(name)
    return made.write(
        tensors, target_modules=names, modules_to_save=heads, peft_version="0.21.2",
        trainable_token_indices={table.rpartition(".")[2]: IDS},
        target_parameters=[f"{module}.{name}" for module, parameters in stacks.items() for name in parameters],
    )  # fmt: skip


def file_bytes(folder: str) -> int:
    return (Path(folder) / WEIGHTS).stat().st_size


class _Made:
    def __init__(self, model: str, variant: str):
        config, _ = open_checkpoint(find_model(model))
        self.targets = Targets(empty(config))
        self._named = self.targets._places
        self.random = np.random.default_rng(zlib.crc32(variant.encode()))
        self._shapes = {name: self._shape(places) for name, places in self.matrices()}

    def matrices(self) -> Iterator[tuple[str, list[Place]]]:
        """The names of modules with the matrices that they are; each matrix once, if it has several names."""
        seen: set[str] = set()
        for tensor, places in self._named.items():
            if all(place.is_matrix for place in places) and not seen & {place.full for place in places}:
                seen |= {place.full for place in places}
                yield tensor.removesuffix(".weight"), places

    @staticmethod
    def is_head(places: list[Place]) -> bool:
        return places[0].path == HEAD

    @staticmethod
    def is_expert(places: list[Place]) -> bool:
        return ".experts." in places[0].path

    @staticmethod
    def _shape(places: list[Place]) -> tuple[int, int]:
        return sum(place.shape[0] for place in places), places[0].shape[1]

    def table(self) -> str:
        """The table of tokens."""
        return self._first(lambda place: place.is_table)

    def norm(self) -> str:
        """A norm."""
        return self._first(lambda place: isinstance(place.leaf, RMSNorm | LayerNorm) and place.name == "weight")

    def _first(self, fits: Any) -> str:
        tensor = next(name for name, places in self._named.items() if len(places) == 1 and fits(places[0]))
        return tensor.removesuffix(".weight")

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, np.float32)

    def pair(self, name: str) -> Tensors:
        """Its product changes x by about as much as a trained matrix makes of it."""
        outputs, inputs = self._shapes[name]
        a, b = self.normal(RANK, inputs) * inputs**-0.5, self.normal(outputs, RANK) * 0.3
        return {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}

    def vectors(self, name: str) -> Tensors:
        outputs, _ = self._shapes[name]
        magnitude = self.random.uniform(0.5, 1.5, outputs).astype(np.float32)
        return {f"{name}.lora_magnitude_vector": magnitude, f"{name}.lora_B.bias": self.normal(outputs) * 0.1}

    def table_pair(self, name: str) -> Tensors:
        tokens, width = self.targets.tensor(f"{name}.weight")[0].shape
        a, b = self.normal(RANK, tokens) * 0.1, self.normal(width, RANK) * 0.1
        return {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}

    def rows(self, name: str) -> Tensors:
        _, width = self.targets.tensor(f"{name}.weight")[0].shape
        return {f"{name}.token_adapter.trainable_tokens_delta": self.normal(len(IDS), width) * 0.5}

    def stacks(self) -> dict[str, list[str]]:
        """The parameters that hold all experts' matrices, by module, in the order in which peft nests them."""
        return {
            module: [name for name in ("gate_up_proj", "down_proj") if self.targets.expert(path, 0, name)]
            for module, (path, _) in self.targets._mixtures.items()
        }

    def stacked(self, stacks: Mapping[str, Sequence[str]]) -> Tensors:
        found: Tensors = {}
        for module, parameters in stacks.items():
            path, experts = self.targets._mixtures[module]
            for level, parameter in enumerate(reversed(parameters)):
                outputs, inputs = self._shape(self.targets.expert(path, 0, parameter))
                name = module + ".base_layer" * level
                found[f"{name}.lora_A.weight"] = self.normal(experts * RANK, inputs) * inputs**-0.5
                found[f"{name}.lora_B.weight"] = self.normal(outputs, experts * RANK) * 0.3
        return found

    def matrix(self, name: str) -> Tensors:
        outputs, inputs = self._shapes[name]
        return {f"{name}.weight": self.normal(outputs, inputs) * inputs**-0.5}

    def saved(self, name: str) -> Tensors:
        shape = self.targets.tensor(f"{name}.weight")[0].shape
        return {f"{name}.weight": 1 + self.normal(*shape) * 0.2}

    def write(self, tensors: Tensors, **config: Any) -> str:
        folder = Path(models.fresh_folder())
        return str(write_peft(folder, tensors, r=RANK, lora_alpha=RANK, **config))
