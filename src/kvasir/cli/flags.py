"""Command-line flags made from option groups: one source for the name, the type, the default and the help."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from kvasir.config import EngineOptions


def engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command that takes `model: str` and `engine: EngineOptions` the flags of all engine options."""
    fields = [f for f in dataclasses.fields(EngineOptions) if f.name != "model"]
    hints = get_type_hints(EngineOptions)

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = {f.name: kwargs.pop(f.name) for f in fields}
        return command(*args, engine=EngineOptions(model=kwargs["model"], **chosen), **kwargs)

    signature = inspect.signature(command, eval_str=True)
    own = [p for name, p in signature.parameters.items() if name != "engine"]
    extra = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=f.default,
            annotation=Annotated[
                hints[f.name],
                typer.Option(*f.metadata["flags"], help=f.metadata["help"], rich_help_panel="Engine"),
            ],
        )
        for f in fields
    ]
    run.__signature__ = signature.replace(parameters=[*own, *extra])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
    return run
