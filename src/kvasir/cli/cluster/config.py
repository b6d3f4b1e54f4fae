"""The file of a fleet on Ray: its models with their replicas, the server in front of them, and the Ray cluster.

A model's keys are the options of `kvasir serve` with underscores, and so are the server's: they are made from the same
groups of options as the flags, so that a name means the same in both.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import typer

from kvasir.cli.api_workers import check_workers
from kvasir.cli.cluster.yaml_file import read_yaml
from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.operation import OperationOptions
from kvasir.cli.quantities import QUANTITIES, parse_bytes
from kvasir.config import EngineOptions, check
from kvasir.errors import ConfigError, KvasirError, quoted

# Options of an engine or a fleet that the fleet itself decides, or that have a key of their own here.
_GIVEN = frozenset("model served_model_name lora role transfer_listen transfer_peer cache_offer cache_peer".split())
_TRANSFER = ("transfer_key", "transfer_cert", "transfer_ca", "transfer_memory")
_OF_FLEET = (
    *("replicas", "max_replicas", "min_replicas", "scale_down_delay"),
    *("prefill_replicas", "decode_replicas", "router_policy"),
)
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What Ray keeps free for a replica. cpus: also its computing threads, unless the model has `threads`. memory:
    bytes, or a size such as 32GiB. custom: amounts of resources that nodes were given, such as {"a100": 1}."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int | str | None = None
    custom: dict[str, float] = {}

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus"):
            if not 0 <= getattr(self, name) <= 4096:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to 4096")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise ValueError(f"memory is {self.memory}; expected bytes, 1 or more")
        if any(not 0 < amount <= 1e6 for amount in self.custom.values()):
            raise ValueError("custom has an amount that is not above 0; leave that resource out")

    @property
    def memory_bytes(self) -> int | None:
        """Raises ValueError."""
        try:
            return None if self.memory is None else parse_bytes(str(self.memory))
        except typer.BadParameter:
            expected = "expected bytes, or a size such as 32GiB"
            raise ValueError(f"memory is {quoted(str(self.memory))}; {expected}") from None


class RayPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where Ray is. address: of a cluster that runs, `auto` for the one of this machine; None starts one for this
    fleet, on this machine. num_cpus, num_gpus: of that one; None for what the machine has."""

    address: str | None = None
    num_cpus: int | None = None
    num_gpus: int | None = None

    def __post_init__(self) -> None:
        if self.address is not None and (self.num_cpus is not None or self.num_gpus is not None):
            raise ValueError("num_cpus and num_gpus are for a cluster that is started; leave them, or address, out")
        if self.address is not None and (not self.address or "://" in self.address):
            raise ValueError(f"address is {self.address!r:.100}; expected auto or HOST:PORT")


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the server reaches replicas on other nodes: by TLS and a key. All are files that every node has. cert,
    cert_key: PEM, of the replicas. ca: PEM, of who signed it. name: in the certificate. key: of mode 600."""

    key: Path
    cert: Path
    cert_key: Path
    ca: Path
    name: str = "kvasir-replica"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model: the options of its engines, its replicas, and what each of them needs."""

    options: EngineOptions
    fleet: FleetOptions = field(default_factory=FleetOptions)
    resources: Resources = field(default_factory=Resources)

    @property
    def name(self) -> str:
        return self.options.served_model_name or self.options.model

    @property
    def served(self) -> EngineOptions:
        """The options as the server needs them, which exchanges no blocks itself."""
        return replace(self.options, **dict.fromkeys(_TRANSFER))


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """The server: the options of `kvasir serve`."""

    operation: OperationOptions
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: list[str] | None = None
    keys: Path | None = None
    allowed_host: list[str] | None = None
    allowed_origin: list[str] | None = None
    drain: float = 30.0
    seed: int | None = None
    tool_format: str = "auto"
    reasoning_format: str = "auto"


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What a file describes. reach: None keeps all replicas on the server's node, behind Unix sockets."""

    name: str
    ray: RayPlace
    server: ServerPlan
    reach: Reach | None
    models: tuple[ModelPlan, ...]

    def of(self, options: EngineOptions) -> ModelPlan:
        """The model that these options are of."""
        return next(m for m in self.models if m.name == options.served_model_name)


def _struct(name: str, *groups: tuple[type, frozenset[str] | None], **own: Any) -> type[msgspec.Struct]:
    """A Struct with the options of the groups: those named, or all but those named in _GIVEN. What a file leaves out is
    UNSET. Quantities may be texts, as for the flags."""
    rows: dict[str, Any] = dict(own)
    for group, names in groups:
        hints = get_type_hints(group)
        for f in dataclasses.fields(group):
            if "help" in f.metadata and (f.name in names if names is not None else f.name not in _GIVEN):
                rows[f.name] = hints[f.name] | str if f.metadata["unit"] in QUANTITIES else hints[f.name]
    fields = [(key, kind | msgspec.UnsetType, msgspec.UNSET) for key, kind in rows.items()]
    return msgspec.defstruct(name, fields, frozen=True, forbid_unknown_fields=True, module=__name__)


_Model = _struct(
    "_Model",
    (EngineOptions, None),
    (FleetOptions, frozenset(_OF_FLEET)),
    model=str,
    served_model_name=str | None,
    adapters=dict[str, str] | None,
    resources=Resources,
)


def _flags(struct: type[msgspec.Struct], *groups: type) -> dict[str, str]:
    """The option of each long flag, with underscores, that is no key by itself."""
    found = {}
    for option in (f for group in groups for f in dataclasses.fields(group) if f.name in struct.__struct_fields__):
        for flag in option.metadata.get("flags", ()):
            if flag.startswith("--"):
                found[flag.partition("/")[0][2:].replace("-", "_")] = option.name
    return {flag: name for flag, name in found.items() if flag not in struct.__struct_fields__}


_MODEL_FLAGS = _flags(_Model, EngineOptions, FleetOptions)
_PLAIN = {k: v for k, v in get_type_hints(ServerPlan).items() if k != "operation"}
_Server = _struct("_Server", (OperationOptions, None), **_PLAIN)
_SERVER_FLAGS = _flags(_Server, OperationOptions)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: list[_Model]  # type: ignore[valid-type]
    name: str = "kvasir"
    ray: RayPlace = RayPlace()
    server: _Server = _Server()  # type: ignore[valid-type]
    reach: Reach | None = None


_SECTIONS = {"": _File, "models": _Model, "server": _Server, "ray": RayPlace, "reach": Reach, "resources": Resources}


def read_config(path: Path) -> ClusterPlan:
    """What the file describes. Raises ConfigError that names the key, what was expected and what to do."""
    return plan_of(read_yaml(path), str(path))


def plan_of(data: Any, name: str) -> ClusterPlan:
    """What a file's data describes. name: of the file, for errors. Raises ConfigError."""
    data = _by_fields(data, name)
    try:
        file = msgspec.convert(data, _File, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise _explained(str(error), name) from None
    if not _NAME.fullmatch(file.name):
        hint = "expected up to 63 lower-case letters, digits and hyphens"
        raise ConfigError(f"{name}: name: {quoted(file.name)} is no name of a fleet", hint)
    if not file.models:
        raise ConfigError(f"{name}: models: the list is empty", "expected at least one `- model: NAME`")
    models = tuple(within(f"{name}: models[{i}]", _model, one) for i, one in enumerate(file.models))
    if len({m.name for m in models}) < len(models):
        raise ConfigError(f"{name}: models: two have the same name", "give one of them a served_model_name")
    server = within(f"{name}: server", _server, file.server)
    if server.operation.api_workers > 1 and len(models) > 1:
        raise ConfigError(f"{name}: server.api_workers: with several models", "expected 1, or a single model")
    loads = bool(server.operation.lora_dir)
    models = tuple(replace(m, options=replace(m.options, loads_adapters=loads)) for m in models)
    plan = ClusterPlan(file.name, file.ray, server, file.reach, models)
    for i, model in enumerate(models):
        _check_roles(f"{name}: models[{i}]", model, plan)
    return plan


def _by_fields(data: Any, name: str) -> Any:
    """The data with each option under the name of its field, where a file has that of another of its flags. Raises
    ConfigError for an option that a section has twice."""
    if not isinstance(data, dict):
        return data
    found = dict(data)
    if isinstance(models := data.get("models"), list):
        found["models"] = [_renamed(one, f"{name}: models[{i}]", _MODEL_FLAGS) for i, one in enumerate(models)]
    if "server" in data:
        found["server"] = _renamed(data["server"], f"{name}: server", _SERVER_FLAGS)
    return found


def _renamed(section: Any, where: str, flags: dict[str, str]) -> Any:
    if not isinstance(section, dict):
        return section
    found: dict[Any, Any] = {}
    for key, value in section.items():
        if (option := flags.get(key, key)) in found:
            raise ConfigError(f"{where}.{key}: the option {option} is there twice", "give it once")
        found[option] = value
    return found


def _check_roles(where: str, model: ModelPlan, plan: ClusterPlan) -> None:
    """Raises ConfigError for replicas with roles on several nodes without what their exchange of blocks needs."""
    files = ("transfer_key", "transfer_cert")
    if plan.reach and model.fleet.prefill_replicas and any(getattr(model.options, f) is None for f in files):
        hint = "give both, files that every node has (docs/disaggregation.md), or leave `reach` out"
        raise ConfigError(f"{where}: replicas with roles on several nodes need transfer_key and transfer_cert", hint)


def within(where: str, make: Any, value: Any) -> Any:
    """What `make` makes; its errors say where in the file."""
    try:
        return make(value)
    except KvasirError as error:
        raise ConfigError(f"{where}: {error.message}", error.hint) from None


def _given(value: Any, group: type) -> dict[str, Any]:
    """The options of a group that a file gives. Raises ConfigError."""
    found = {}
    for option in dataclasses.fields(group):
        one = getattr(value, option.name, msgspec.UNSET)
        if one is not msgspec.UNSET:
            found[option.name] = _parsed(option, one)
    return found


def _parsed(option: dataclasses.Field[Any], value: Any) -> Any:
    """The value of an option, which may be written as for its flag. Raises ConfigError."""
    quantity = QUANTITIES.get(option.metadata.get("unit", ""))
    if quantity is None or not isinstance(value, str):
        return value
    try:
        return quantity.parse(value)
    except typer.BadParameter as error:
        raise ConfigError(f"{option.name}: {error.message}", "correct it; docs/fleet.md describes the keys") from None


def _model(value: Any) -> ModelPlan:
    if value.model is msgspec.UNSET:
        raise ConfigError("the key `model` is missing", "expected a folder, a .gguf file, org/name, or a stored name")
    adapters = {} if value.adapters is msgspec.UNSET else value.adapters or {}
    lora = [f"{name}={path}" for name, path in adapters.items()] or None
    options = EngineOptions(**_given(value, EngineOptions), lora=lora)
    options = replace(options, served_model_name=options.served_model_name or options.model)
    fleet = FleetOptions(**_given(value, FleetOptions))
    resources = Resources() if value.resources is msgspec.UNSET else value.resources
    if options.threads is None:
        options = replace(options, threads=max(1, int(resources.cpus)))
    fleet.check(options, alone=True)
    between_nodes = fleet.prefill_replicas and options.transfer_key
    check(replace(options, role="decode", transfer_listen="0.0.0.0:1") if between_nodes else options)
    return ModelPlan(options, fleet, resources)


def _server(value: Any) -> ServerPlan:
    operation = OperationOptions(**_given(value, OperationOptions))
    check_workers(operation.api_workers, alone=True)
    return ServerPlan(operation, **_given(value, ServerPlan))


def _path(kind: type, value: Any) -> Any:
    """Paths, for msgspec."""
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    raise ValueError("expected a path")


def _explained(message: str, name: str) -> ConfigError:
    """A ConfigError from a message of msgspec, such as "Expected `int`, got `str` - at `$.models[0].port`"."""
    what, _, place = message.rpartition(" - at ")
    what, place = (what, place.strip("`")) if what else (message, "$")
    key = place.removeprefix("$").removeprefix(".")
    if found := re.search(r"unknown field `(.*)`", what):
        section = re.sub(r"\[.*?\]", "", key).rpartition(".")[2]
        known = sorted(_SECTIONS.get(section, _File).__struct_fields__)
        near = difflib.get_close_matches(found[1], known, 1)
        hint = f"did you mean {near[0]}?" if near else f"expected some of: {', '.join(known)}"
        full = f"{key}.{found[1]}" if key else found[1]
        return ConfigError(f"{name}: {full}: there is no such key", hint)
    return ConfigError(f"{name}: {key or 'the file'}: {what}", "correct it; docs/fleet.md describes the keys")
