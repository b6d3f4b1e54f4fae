"""The adapters that a user gives an engine: names, files and scales, as options write them.

    sql=PATH              "sql" is an adapter that requests select by its name
    sql=PATH:0.5          the same, with half of its effect
    qwen3:sql=PATH        "sql" of the model "qwen3", for a server of several
    PATH, PATH:0.5        llama.cpp's: an adapter for every request that selects none, named after its file
    {"name": "sql", "path": PATH, "scale": 0.5, "default": 0, "pinned": false, "model": "qwen3"}

Several may stand in one text, separated by commas, or in a JSON list.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import PurePath
from typing import Any

from kvasir.errors import ConfigError, InvalidRequest, quoted

MAX_NAME = 256
MAX_SCALE = 1e4
MAX_CHOSEN = 64  # adapters of one request
FORMS = 'expected NAME=PATH, NAME=PATH:SCALE, MODEL:NAME=PATH, a path for every request, or {"name": ..., "path": ...}'

# What a program's request selects: a name, several, or names with scales.
Lora = str | Sequence[str | tuple[str, float]] | Mapping[str, float]
_SGLANG = {"lora_name": "name", "lora_path": "path"}
_NAME = re.compile(r"[^\s:=,{}\"'\\]{1,256}")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
_SCALED = re.compile(r"(?P<path>.+):(?P<scale>[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?)")


@dataclass(frozen=True, slots=True)
class AdapterOption:
    """An adapter of a server. path: of its folder or GGUF file. scale: for requests that select it by its name.
    default: for requests that select none; 0 leaves it out. pinned: it stays in memory. always: it is part of the
    model, and applies with its scale unless a request gives it another. own: it is in the model's checkpoint, and left
    out where it cannot be computed. model: whose it is; "" if that needs no saying."""

    name: str
    path: str
    scale: float = 1.0
    default: float = 0.0
    pinned: bool = False
    always: bool = False
    own: bool = False
    model: str = ""

    @property
    def text(self) -> str:
        """A text that `parse_adapters` reads as this adapter."""
        left_out = ("own",) if self.model else ("own", "model")
        return json.dumps({name: value for name, value in asdict(self).items() if name not in left_out})


@dataclass(frozen=True, slots=True)
class AdapterScale:
    """An adapter that a request selects, by its name, with a scale; None: the one that the server has for it."""

    name: str
    scale: float | None = None


def parse_adapters(texts: Sequence[str]) -> tuple[AdapterOption, ...]:
    """The adapters that options name, in order. Raises ConfigError for a text in no known form, a name that cannot be
    one, and a name that occurs twice for a model."""
    found = tuple(option for text in texts for option in _parse(text))
    names = [(option.model, option.name) for option in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two adapters are named {quoted(twice[1])}", "give each its own name: NAME=PATH")
    return found


def of_model(given: Sequence[AdapterOption], *names: str | None) -> tuple[AdapterOption, ...]:
    """The adapters for a model with these names, without its name. Raises ConfigError for one of another model."""
    known = [name for name in names if name]
    if wrong := next((one for one in given if one.model and not _among(one.model, known)), None):
        message = f"the adapter {quoted(wrong.name)} is for the model {quoted(wrong.model)}, not for {quoted(known[0])}"
        raise ConfigError(message, "name the model as it is served, or leave it out: NAME=PATH")
    return tuple(replace(one, model="") for one in given)


def by_model(given: Sequence[AdapterOption], models: Sequence[str]) -> dict[str, tuple[AdapterOption, ...]]:
    """The adapters of each of several models, without its name. Raises ConfigError for one of none of them, or one that
    does not say of which."""
    found: dict[str, tuple[AdapterOption, ...]] = dict.fromkeys(models, ())
    for one in given:
        if not (model := _among(one.model, models)):
            whose = f"is for the model {quoted(one.model)}" if one.model else "may be of any model"
            served = ", ".join(models) if models else "those of the store, which get adapters by a Modelfile"
            message = f"the adapter {quoted(one.name)} {whose}, and this server has several: {served}"
            raise ConfigError(message, "give it as MODEL:NAME=PATH" if models else "name the models, or leave it out")
        found[model] += (replace(one, model=""),)
    return found


def _among(name: str, models: Sequence[str]) -> str:
    """The model of this name, with or without ":latest"; "" if there is none."""
    spellings = (name, name.removesuffix(":latest"), f"{name}:latest")
    return next((spelling for spelling in spellings if spelling in models), "")


def selected_by_name(options: Mapping[str, AdapterOption]) -> list[AdapterOption]:
    """The adapters that are not for all requests."""
    return [option for option in options.values() if not (option.default or option.always)]


def for_all_requests(texts: Sequence[str] | None) -> list[str] | None:
    """The same adapters, applied to every request, for callers that cannot select. Raises ConfigError."""
    given = parse_adapters(texts or ())
    return [replace(one, default=one.default or one.scale).text for one in given] or None


def given_adapters(value: Any) -> tuple[str, ...]:
    """The texts for `parse_adapters` of a program's `lora`: a mapping of names to paths, or a list of texts. Raises
    ConfigError."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return tuple(AdapterOption(str(name), str(path)).text for name, path in value.items())
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Sequence) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise ConfigError(f"lora is {quoted(value)}", 'give {"name": "path"}, or a list of NAME=PATH')


def chosen_adapters(lora: Lora | None) -> tuple[AdapterScale, ...] | None:
    """The adapters of a program's request; None for those of the engine's options. Raises InvalidRequest."""
    if lora is None:
        return None
    listed = [lora] if isinstance(lora, str) else list(lora.items()) if isinstance(lora, Mapping) else list(lora)
    found = []
    for one in listed:
        name, scale = (one, None) if isinstance(one, str) else one
        found.append(AdapterScale(check_name(name, "lora"), None if scale is None else check_scale(scale, "lora")))
    return tuple(found)


def is_folder_name(name: object) -> bool:
    """Whether a client's text may be looked up as a folder of that name."""
    return isinstance(name, str) and _FOLDER.fullmatch(name) is not None and ".." not in name


def check_name(name: Any, param: str | None = None) -> str:
    """The name, if it can be one. Raises InvalidRequest."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.isprintable():
        expected = f"expected 1 to {MAX_NAME} characters without spaces, quotes, commas, colons and ="
        raise InvalidRequest(f"{quoted(name)} cannot be the name of an adapter", expected, param=param)
    return name


def check_scale(scale: Any, param: str | None = None) -> float:
    """The scale as a float. Raises InvalidRequest."""
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale) or abs(scale) > MAX_SCALE:
        raise InvalidRequest(f"the scale is {quoted(scale)}", f"expected a number up to {MAX_SCALE:g}", param=param)
    return float(scale)


def _parse(text: str) -> list[AdapterOption]:
    stripped = text.strip()
    if stripped.startswith(("{", "[")):
        return _from_json(stripped)
    parts = [part.strip() for part in stripped.split(",")]
    if not all(parts):
        raise ConfigError(f"an adapter is {quoted(text)}", FORMS)
    return [_one(part) for part in parts]


def _one(text: str) -> AdapterOption:
    whose, equals, rest = text.partition("=")
    model, colon, name = whose.rpartition(":")
    named = bool(equals) and bool(model) == bool(colon) and _NAME.fullmatch(name) is not None
    path = rest if named else text
    found = _SCALED.fullmatch(path)
    scale = float(found["scale"]) if found else 1.0
    path = found["path"] if found else path
    if not path or not whose:
        raise ConfigError(f"an adapter is {quoted(text)}", FORMS)
    return _made(name, path, scale, model=model) if named else _made(file_name(path), path, scale, scale)


def file_name(path: str) -> str:
    """The name that an adapter gets from its path: the last part of it."""
    return re.sub(r"[\s:=,{}\"'\\]", "-", PurePath(path).name.removesuffix(".gguf")) or "adapter"


def _from_json(text: str) -> list[AdapterOption]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"an adapter is not JSON: {error}", FORMS) from None
    return [_of_object(one) for one in (value if isinstance(value, list) else [value])]


def _of_object(value: Any) -> AdapterOption:
    if not isinstance(value, dict):
        raise ConfigError(f"an adapter is {quoted(value)}", FORMS)
    given: dict[str, Any] = {_SGLANG.get(str(key), str(key)): item for key, item in value.items()}
    given.pop("base_model_name", None)  # vLLM's, which shows it only
    given.pop("lora_id", None)
    unknown = sorted(set(given) - {f.name for f in fields(AdapterOption)} | ({"own"} & set(given)))
    path, flags = given.get("path"), {name: given.get(name, False) for name in ("pinned", "always")}
    are_bools = all(isinstance(flag, bool) for flag in flags.values())
    model = given.get("model", "")
    texts = isinstance(path, str) and isinstance(model, str)
    if unknown or not texts or not path or not are_bools or "name" not in given:
        wrong = f"has {quoted(unknown[0])}" if unknown else f"is {quoted(value)}"
        raise ConfigError(f"an adapter {wrong}", FORMS)
    return _made(given["name"], path, given.get("scale", 1.0), given.get("default", 0.0), model=model, **flags)


def _made(name: Any, path: str, scale: Any, default: Any = 0.0, **more: Any) -> AdapterOption:
    try:
        return AdapterOption(check_name(name), path, check_scale(scale), check_scale(default), **more)
    except InvalidRequest as error:
        raise ConfigError(error.message, error.hint) from None
