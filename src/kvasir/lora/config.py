"""The config of an adapter in peft's form, `adapter_config.json`.

A field that this module does not know and that is set to anything is refused by name: peft adds kinds of adapters as
fields of this config, and ignoring one would compute something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.json_file import read_json_object
from kvasir.lora.adapter import MAX_RANK, check_scale
from kvasir.lora.patterns import Budget, Pattern, matches_end

CONFIG = "adapter_config.json"
MAX_CONFIG_BYTES = 8 << 20
MAX_NAMES = 100_000  # in a list, and keys of a pattern
MAX_TOKENS = 1 << 20
MAX_NAME = 1000  # characters of a module's name
ALL_LINEAR = "all-linear"

# Fields that say how an adapter was trained or stored. Orientation of the base model's matrices (fan_in_fan_out) is
# none of the adapter's: a and b have one orientation.
HARMLESS = frozenset(
    """auto_mapping eva_config fan_in_fan_out inference_mode loftq_config lora_dropout megatron_config megatron_core
    peft_version qalora_group_size runtime_config task_type base_model_name_or_path revision""".split()
)
_READ = frozenset(
    """peft_type r lora_alpha target_modules exclude_modules bias use_rslora use_dora rank_pattern alpha_pattern
    modules_to_save layers_to_transform layers_pattern lora_bias target_parameters trainable_token_indices
    alora_invocation_tokens ensure_weight_tying init_lora_weights""".split()
)
# Initializations that leave the base model's weights as they are; the others change them (PiSSA, OLoRA, ...).
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """What of a config changes the arithmetic. modules: of `target_modules`, a pattern or names; `parameters`:
    `target_parameters`. saves: `modules_to_save`. layers: `layers_to_transform`, None for all. tokens: ids by the name
    of a table, "" for the input embedding. invocation: of aLoRA. ties: whether a tied head follows the embedding."""

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    lora_bias: bool
    bias: str
    modules: str | tuple[str, ...]
    excluded: str | tuple[str, ...]
    parameters: tuple[str, ...]
    saves: tuple[str, ...]
    layers: tuple[int, ...] | None
    layers_pattern: tuple[str, ...]
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    tokens: Mapping[str, tuple[int, ...]]
    invocation: tuple[int, ...]
    ties: bool
    base: Mapping[str, str]
    version: tuple[int, ...]
    path: Path

    def sizes(self, name: str, budget: Budget) -> tuple[int, float]:
        """Rank and scale of a module, or of a parameter with the name of its module."""
        rank = self.ranks.get(self._key(self.ranks, name, budget, "rank_pattern"), self.rank)
        alpha = self.alphas.get(self._key(self.alphas, name, budget, "alpha_pattern"), self.alpha)
        scale = alpha / math.sqrt(rank) if self.rslora else alpha / rank
        return rank, check_scale(f"{self.path}: the scale of {quoted(name)}", scale)

    def _key(self, patterns: Mapping[str, Any], name: str, budget: Budget, where: str) -> str:
        """The first key that matches the name, as in peft."""
        for key in patterns:
            with _Named(self.path, where, key):
                if matches_end(key, name, budget):
                    return key
        return ""

    def selects(self, module: str, budget: Budget) -> bool:
        """Whether peft puts an adapter on a linear layer or a table of this name."""
        if self._within(self.excluded, module, budget, "exclude_modules") or self.is_saved(module):
            return False
        if self.modules == ALL_LINEAR:
            return True
        if not self._within(self.modules, module, budget, "target_modules"):
            return False
        named = isinstance(self.modules, str) or module in self.modules
        return named or self.layers is None or self._layer_of(module, budget) in self.layers

    def _within(self, names: str | tuple[str, ...], module: str, budget: Budget, where: str) -> bool:
        if isinstance(names, tuple):
            return module in names or any(module.endswith(f".{name}") for name in names)
        with _Named(self.path, where, names):
            return bool(names) and Pattern(names).fullmatch(module, budget)

    def is_saved(self, module: str) -> bool:
        """Whether a module is one of, or within one of, `modules_to_save`: as for peft, those whose names end so, also
        amid a word."""
        within = accumulate(module.split("."), lambda path, name: f"{path}.{name}")
        return any(path.endswith(tuple(self.saves)) for path in within)

    def _layer_of(self, module: str, budget: Budget) -> int:
        """The first number of a layer in a module's name; -1 without one."""
        found = [(m.start() - 1, int(m[1])) for m in re.finditer(r"(?<=\.)(\d{1,9})(?=\.)", module)]
        if not self.layers_pattern:
            return next((number for end, number in found if "." in module[:end]), -1)
        for pattern in self.layers_pattern:
            with _Named(self.path, "layers_pattern", pattern):
                for end, number in found:
                    if matches_end(pattern, module[:end], budget):
                        return number
        return -1

    def parameters_of(self, module: str, known: tuple[str, ...]) -> list[str]:
        """Which of these parameters of a module have adapters, in the same order: that of the module's class, in which
        peft nests them."""
        targets = self.parameters
        keys = {name: f"{module}.{name}" for name in known}
        return [n for n, key in keys.items() if key in targets or any(key.endswith(f".{t}") for t in targets)]

    def facts(self) -> list[Any]:
        """The fields of the content hash that do not follow from the tensors' names and shapes."""
        version = self.version if self.parameters else ()  # it decides between layouts of experts
        return [self.dora, self.lora_bias, sorted(self.tokens.items()), self.invocation, self.ties, version]


class _Named:
    """Turns ValueErrors of patterns into errors that name the file and the field."""

    def __init__(self, path: Path, where: str, pattern: str):
        self.text = f"{path}: the pattern {quoted(pattern)} in {where}"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ValueError) and not isinstance(error, ModelFileError):
            raise UnsupportedModel(f"{self.text} cannot be used: {error}", "name the modules instead") from error


def read_config(path: Path) -> PeftConfig:
    """Reads a config. Raises ModelFileError for bad values, UnsupportedModel for kinds of adapters without code."""
    f = _Fields(path, read_json_object(path, MAX_CONFIG_BYTES))
    kind = f.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{path}: peft_type is {quoted(kind)}, expected 'LORA'", "use a low-rank adapter")
    f.refuse_unknown()
    start = f.get("init_lora_weights", True)
    if not any(start is one or (isinstance(one, str) and start == one) for one in _INITIALIZATIONS):
        raise UnsupportedModel(
            f"{path}: init_lora_weights is {quoted(start)}, which changes the base model's weights",
            "convert the adapter with peft: save_pretrained(path_initial_model_for_weight_conversion=...)",
        )
    bias = f.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        f.refuse("bias", "one of none, all, lora_only")
    layers = f.get("layers_to_transform")
    return PeftConfig(
        rank=f.integer("r", 8),
        alpha=f.number("lora_alpha", f.get("lora_alpha", 8)),
        rslora=f.flag("use_rslora"),
        dora=f.flag("use_dora"),
        lora_bias=f.flag("lora_bias"),
        bias=str(bias),
        modules=f.names("target_modules", pattern=True),
        excluded=f.names("exclude_modules", pattern=True),
        parameters=tuple(f.names("target_parameters")),
        saves=tuple(f.names("modules_to_save")),
        layers=None if layers in (None, []) else f.ids("layers_to_transform", layers),
        layers_pattern=tuple(f.names("layers_pattern", alone=True)),
        ranks={key: f.rank("rank_pattern", value) for key, value in f.table("rank_pattern").items()},
        alphas={key: f.number("alpha_pattern", value) for key, value in f.table("alpha_pattern").items()},
        tokens=f.tokens(),
        invocation=f.ids("alora_invocation_tokens", f.get("alora_invocation_tokens") or []),
        ties=f.flag("ensure_weight_tying"),
        base=f.base(),
        version=f.version(),
        path=path,
    )


class _Fields:
    """The fields of a config; errors name the file and the field."""

    def __init__(self, path: Path, values: Mapping[str, Any]):
        self.path, self.values = path, values

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def refuse(self, name: str, expected: str) -> NoReturn:
        raise ModelFileError(
            f"{self.path}: {name} is {quoted(self.get(name))}, expected {expected}", "save the adapter again"
        )

    def refuse_unknown(self) -> None:
        unknown = [name for name, value in self.values.items() if value and name not in HARMLESS | _READ]
        if unknown:
            name = sorted(unknown)[0]
            raise UnsupportedModel(
                f"{self.path}: {quoted(name)} is {quoted(self.get(name))}, which is not supported",
                "without it, other numbers would come out: use an adapter that does not set it",
            )

    def integer(self, name: str, default: int) -> int:
        return self.rank(name, self.get(name, default))

    def rank(self, name: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= MAX_RANK:
            self.refuse(name, f"ranks from 1 to {MAX_RANK}")
        return value

    def number(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) < 1e9:  # also NaN
            self.refuse(name, "finite numbers")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value not in (None, True, False) or (isinstance(value, int | float) and type(value) is not bool):
            self.refuse(name, "true or false")
        return bool(value)

    def names(self, name: str, pattern: bool = False, alone: bool = False) -> Any:
        """A tuple of names; with `pattern`, a text as it is; with `alone`, one name as a tuple."""
        value = self.get(name)
        if isinstance(value, str) and (pattern or alone):
            return value if pattern else (value,) if value else ()
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > MAX_NAMES or not all(isinstance(one, str) for one in value):
            self.refuse(name, "a list of names")
        if any(not one or len(one) > MAX_NAME for one in value):
            self.refuse(name, f"names of 1 to {MAX_NAME} characters")
        return tuple(value)

    def ids(self, name: str, value: Any) -> tuple[int, ...]:
        value = [value] if type(value) is int else value
        if not isinstance(value, list) or len(value) > MAX_TOKENS:
            self.refuse(name, "a list of numbers")
        if not all(type(one) is int and 0 <= one < 2**31 for one in value):
            self.refuse(name, "numbers from 0")
        return tuple(value)

    def table(self, name: str) -> dict[str, Any]:
        value = self.get(name) or {}
        if not isinstance(value, dict) or len(value) > MAX_NAMES or any(len(key) > MAX_NAME for key in value):
            self.refuse(name, "an object whose keys are names of modules")
        return value

    def tokens(self) -> dict[str, tuple[int, ...]]:
        name = "trainable_token_indices"
        value = self.get(name)
        tables = value if isinstance(value, dict) else {"": value} if value else {}
        found = {table: self.ids(name, ids) for table, ids in tables.items()}
        if any(len(set(ids)) < len(ids) for ids in found.values()):
            self.refuse(name, "each id once")
        return found

    def base(self) -> dict[str, str]:
        pairs = {"name": self.get("base_model_name_or_path"), "revision": self.get("revision")}
        return {key: value for key, value in pairs.items() if isinstance(value, str) and value}

    def version(self) -> tuple[int, ...]:
        value = self.get("peft_version")
        found = re.match(r"(\d{1,4})\.(\d{1,4})", value) if isinstance(value, str) else None
        return (int(found[1]), int(found[2])) if found else ()
