"""Adapters in peft's form: a folder with adapter_config.json and adapter_model.safetensors (peft 0.5 to 0.21).

    base_model.model.<module>.lora_A.weight [r, in], .lora_B.weight [out, r], .lora_B.bias, .lora_magnitude_vector [out]
    base_model.model.<table>.lora_embedding_A [r, V], .lora_embedding_B [H, r]
    base_model.model.<table>.token_adapter.trainable_tokens_delta [n, H]: the rows themselves, not differences
    base_model.model.<module>.weight: of modules_to_save, and of tables that were saved with the adapter

A module of which several parameters have adapters is nested, once for each in the order of its class: the first one's
tensors are under the most `.base_layer`. Names do not say which parameter they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.lora.adapter import AdapterFile, Update, check_dtype, check_pair, check_vector, content_hash
from kvasir.lora.config import CONFIG, PeftConfig, read_config
from kvasir.lora.patterns import Budget
from kvasir.weights.safetensors import SafetensorsFile

WEIGHTS = "adapter_model.safetensors"
PICKLED = ("adapter_model.bin", "adapter_model.pt")
PREFIX = "base_model.model."
# Parameters that hold the matrices of all experts, in the order of the classes that have them, and of other modules.
STACKS = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
PARAMETERS = (*STACKS, "weight")
MAX_LEVELS = len(PARAMETERS)
_BASE = ".base_layer"
_TENSOR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<kind>[AB])\.(?P<part>weight|bias)|lora_embedding_(?P<embedding>[AB])"
    r"|(?P<magnitude>lora_magnitude_vector)(?:\.weight)?|token_adapter\.(?P<tokens>trainable_tokens_delta))"
)
_TABLES = ("embed_tokens", "lm_head", "wte", "word_embeddings", "tok_embeddings")  # saved if their size changed


@dataclass(slots=True)
class _Parts:
    """The tensors of one module at one level of nesting, by kind: "A", "B", "bias", "magnitude"."""

    found: dict[str, np.ndarray] = field(default_factory=dict)
    embedding: bool = False


@dataclass(slots=True)
class _Sorted:
    """The tensors of a file by what they are. whole: those that are no part of a low-rank change."""

    modules: dict[str, dict[int, _Parts]] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    whole: dict[str, np.ndarray] = field(default_factory=dict)


def read_peft(folder: Path) -> AdapterFile:
    """Reads an adapter's folder. Raises ModelFileError for what is damaged or does not fit together, UnsupportedModel
    for what has no code, or is pickled: pickles can run code and are never opened."""
    config = read_config(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        pickled = [name for name in PICKLED if (folder / name).exists()]
        if pickled:
            raise UnsupportedModel(
                f"{folder / pickled[0]} is pickled, which can run code and is never read", "convert it to safetensors"
            )
        raise ModelFileError(f"{folder}: there is no {WEIGHTS}", "download the adapter again")
    file = SafetensorsFile(folder / WEIGHTS)
    for name, info in file.tensors.items():
        check_dtype(name, info.dtype)
    arrays = {name: file.array(name) for name in file.tensors}
    return _Reader(config).read(arrays, folder)


def _is_head(module: str) -> bool:
    return module.rpartition(".")[2] == "lm_head"


class _Reader:
    def __init__(self, config: PeftConfig):
        self.config, self.budget = config, Budget()

    def read(self, arrays: Mapping[str, np.ndarray], folder: Path) -> AdapterFile:
        parts = self._sort(arrays)
        self.ties = self.config.ties and not any(map(_is_head, parts.modules))
        updates = tuple(self._updates(parts.modules))
        saved, tied = self._saved(parts.whole, updates)
        tokens = self._tokens(parts.tokens)
        if not (updates or saved or tokens):
            raise ModelFileError(f"{folder / WEIGHTS}: there is no tensor of an adapter", "save the adapter again")
        if self.config.ties:
            tied |= {name.rpartition(".")[0] for name in saved}
        sizes = [[u.name, u.rank, u.scale, u.experts, *([True] if u.tied else ())] for u in updates]
        content, nbytes = content_hash(["peft", sizes, self.config.facts(), sorted(tied)], arrays.items())
        return AdapterFile(
            "peft", folder, content, self.config.base, updates, saved, tokens, frozenset({*tied, *tokens}),
            self.config.invocation, nbytes, self.config.version,
        )  # fmt: skip

    def _sort(self, arrays: Mapping[str, np.ndarray]) -> _Sorted:
        found = _Sorted()
        for stored, array in arrays.items():
            name = stored.removeprefix(PREFIX)
            match = _TENSOR.fullmatch(name)
            if match is None:
                if re.search(r"\.(lora_|token_adapter\.|modules_to_save\.|original_module\.)", name):
                    raise UnsupportedModel(f"the adapter has the unknown tensor {quoted(stored)}")
                found.whole[stored] = array
                continue
            if match["tokens"]:
                self._once(found.tokens, match["module"], array, stored)
                continue
            module, level = match["module"], 0
            while module.endswith(_BASE):
                module, level = module.removesuffix(_BASE), level + 1
            if level >= MAX_LEVELS:
                raise ModelFileError(f"tensor {quoted(stored)} of the adapter is nested too deeply")
            parts = found.modules.setdefault(module, {}).setdefault(level, _Parts())
            kind = match["embedding"] or ("bias" if match["part"] == "bias" else match["kind"]) or "magnitude"
            if match["part"] == "bias" and match["kind"] == "A":
                raise UnsupportedModel(f"the adapter has the unknown tensor {quoted(stored)}")
            parts.embedding |= bool(match["embedding"])
            self._once(parts.found, kind, array, stored)
        return found

    @staticmethod
    def _once(held: dict[str, np.ndarray], key: str, array: np.ndarray, stored: str) -> None:
        if key in held:
            raise ModelFileError(f"the adapter has tensor {quoted(stored)} twice, under two names")
        held[key] = array

    def _updates(self, modules: Mapping[str, Mapping[int, _Parts]]) -> Iterable[Update]:
        for module, levels in modules.items():
            follows = self.config.ties and _is_head(module)  # the table; it has the same matrices, transposed
            if list(levels) == [0] and (follows or self.config.selects(module, self.budget)):
                yield self._update(module, "", levels[0])
                continue
            parameters = self.config.parameters_of(module, PARAMETERS)
            if not parameters:
                raise ModelFileError(
                    f"the adapter changes {quoted(module)}, which its config does not select",
                    "peft would ignore these tensors: save the adapter again with the right target_modules",
                )
            if sorted(levels) != list(range(len(parameters))):
                raise ModelFileError(
                    f"the adapter has {len(levels)} pairs of matrices for {quoted(module)}, expected one for each of "
                    f"{', '.join(parameters)}",
                    "target_parameters does not belong to these tensors: save the adapter again",
                )
            for parameter, level in zip(parameters, sorted(levels, reverse=True), strict=True):
                yield self._update(module, parameter, levels[level])

    def _update(self, module: str, parameter: str, parts: _Parts) -> Update:
        name = f"{module}.{parameter}" if parameter else module
        if missing := {"A", "B"} - parts.found.keys():
            raise ModelFileError(f"the adapter has no matrix {missing.pop()} for {quoted(name)}")
        a, b = parts.found["A"], parts.found["B"]
        magnitude, bias = parts.found.get("magnitude"), parts.found.get("bias")
        rank, scale = self.config.sizes(name, self.budget)
        experts = max(1, a.shape[0] // rank) if parameter in STACKS and a.ndim == 2 else 1
        check_pair(name, a, b, rank, experts)
        check_vector(name, "magnitude", magnitude, b.shape[0])
        check_vector(name, "bias", bias, b.shape[0])
        wants = ("use_dora", self.config.dora, magnitude), ("lora_bias", self.config.lora_bias, bias)
        for flag, wanted, vector in wants:
            if wanted != (vector is not None) and not (wanted and (parts.embedding or parameter)):
                raise ModelFileError(
                    f"{self.config.path}: {flag} is {str(wanted).lower()}, but {quoted(name)} has "
                    f"{'no' if vector is None else 'a'} vector for it",
                    "the config does not belong to these tensors: save the adapter again",
                )
        return Update(
            module, a, b, rank, scale, "" if parameter == "weight" else parameter, experts,
            embedding=parts.embedding, tied=parts.embedding and self.ties, magnitude=magnitude, bias=bias,
        )  # fmt: skip

    def _saved(
        self, whole: Mapping[str, np.ndarray], updates: Iterable[Update]
    ) -> tuple[dict[str, np.ndarray], set[str]]:
        """Tensors by their names in the base model, and the tables among them that a tied head follows: the base
        model's own, which peft writes into; those of modules_to_save are copies."""
        saved: dict[str, np.ndarray] = {}
        tied: set[str] = set()
        adapted = {update.module for update in updates}
        for stored, array in whole.items():
            name = stored.removeprefix(PREFIX)
            module, _, kind = name.rpartition(".")
            based, module = module.endswith(_BASE), module.removesuffix(_BASE)
            table = module.rpartition(".")[2] in _TABLES
            bias = kind == "bias" and (self.config.bias == "all" or (self.config.bias != "none" and module in adapted))
            if not (self.config.is_saved(module) or table or bias) or kind not in ("weight", "bias"):
                raise ModelFileError(
                    f"the adapter has tensor {quoted(stored)}, which its config does not name",
                    "expected tensors of target_modules, modules_to_save and, with bias, biases",
                )
            if table and (based or not self.config.is_saved(module)):
                tied.add(module)
            self._once(saved, f"{module}.{kind}", array, stored)
        return saved, tied

    def _tokens(self, found: Mapping[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], np.ndarray]]:
        tokens: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}
        for module, rows in found.items():
            fits = [
                ids for table, ids in self.config.tokens.items() if f".{module}".endswith(f".{table}" if table else "")
            ]
            if len(fits) != 1 or rows.ndim != 2 or len(rows) != len(fits[0]):
                expected = f"[{len(fits[0])}, width]" if len(fits) == 1 else "ids in trainable_token_indices"
                raise ModelFileError(
                    f"the adapter's rows of {quoted(module)} have shape {[*rows.shape]}, expected {expected}",
                    "trainable_token_indices does not belong to these tensors: save the adapter again",
                )
            tokens[module] = fits[0], rows
        if len(tokens) < len(self.config.tokens):
            raise ModelFileError(f"{self.config.path}: trainable_token_indices has ids without rows in the adapter")
        return tokens
