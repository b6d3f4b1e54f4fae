"""Command-line flags made from option groups: one source for the name, the type, the default and the help text."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_type_hints

import typer

from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.models import ModelsOptions
from kvasir.cli.operation import OperationOptions
from kvasir.cli.panels import panel_of
from kvasir.cli.peer_flags import PeerFlags, with_peer_flags
from kvasir.cli.quantities import QUANTITIES
from kvasir.cli.sampler import SamplerOptions
from kvasir.config import EngineOptions


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags of all engine options, and other engines' names for some, to a command that takes `model: str` and
    `engine: EngineOptions`."""

    def make(chosen: Mapping[str, Any], kwargs: Mapping[str, Any]) -> EngineOptions:
        model = kwargs["model"]  # `serve` takes any number of models
        peers = {f.name: chosen[f.name] for f in dataclasses.fields(PeerFlags)}
        own = {name: value for name, value in chosen.items() if name not in peers}
        options = EngineOptions(model=model if isinstance(model, str) else next(iter(model or ()), ""), **own)
        options, notes = with_peer_flags(options, PeerFlags(**peers))
        for note in notes:
            typer.echo(f"note: {note}", err=True)
        return options

    return _with_flags(command, "engine", make, EngineOptions, PeerFlags)


def operation_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags of OperationOptions to a command that takes `operation: OperationOptions`."""
    return _with_flags(command, "operation", lambda chosen, kwargs: OperationOptions(**chosen), OperationOptions)


def fleet_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags of FleetOptions to a command that takes `fleet: FleetOptions`."""
    return _with_flags(command, "fleet", lambda chosen, kwargs: FleetOptions(**chosen), FleetOptions)


def models_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags of ModelsOptions to a command that takes `models: ModelsOptions`."""
    return _with_flags(command, "models", lambda chosen, kwargs: ModelsOptions(**chosen), ModelsOptions)


def sampler_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags of SamplerOptions to a command that takes `sampler: SamplerOptions`."""
    return _with_flags(command, "sampler", lambda chosen, kwargs: SamplerOptions(**chosen), SamplerOptions)


def _with_flags(command: Callable[..., Any], name: str, make: Callable[..., Any], *groups: type) -> Callable[..., Any]:
    """The command with a flag for each option of the groups instead of its parameter `name`; `make` builds that
    argument."""
    fields = [f for group in groups for f in dataclasses.fields(group) if "help" in f.metadata]
    peers = {f.name for f in dataclasses.fields(PeerFlags)}
    hints = {option: hint for group in groups for option, hint in get_type_hints(group).items()}

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = {f.name: kwargs.pop(f.name) for f in fields}
        return command(*args, **{name: make(chosen, kwargs)}, **kwargs)

    signature = inspect.signature(command, eval_str=True)
    own = [p for n, p in signature.parameters.items() if n != name]
    extra = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default,
            annotation=Annotated[hints[f.name], _option(f, "peers" if f.name in peers else name)],
        )
        for f in fields
    ]
    run.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
    return run


def _option(field: dataclasses.Field[Any], group: str) -> Any:
    """The flag of an option."""
    known = field.metadata
    quantity = QUANTITIES.get(known["unit"])
    return typer.Option(
        *known["flags"],
        help=known["help"],
        hidden=known["hidden"],
        show_default=field.default is not False,  # "--no-pin" says it
        rich_help_panel=panel_of(field.name, group),
        parser=quantity and quantity.parse,
        metavar=quantity and quantity.metavar,
    )
