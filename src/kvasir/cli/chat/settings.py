"""/set in a chat: sampling parameters, and what Ollama's /set knows besides them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

from kvasir.cli.chat.session import Session, Settings
from kvasir.cli.sampler import FILES, NUMBERS, structure
from kvasir.environment import user_path
from kvasir.errors import InvalidRequest
from kvasir.store.parameters import SAMPLING
from kvasir.types import StructuredOutputs

RESET = "default"


async def set_value(session: Session, argument: str) -> None:
    """/set [parameter] NAME VALUE, /set system TEXT, or a switch. Raises InvalidRequest."""
    name, _, value = argument.partition(" ")
    if name == "parameter":
        name, _, value = value.strip().partition(" ")
    if name in _SWITCHES and not value:
        return _SWITCHES[name](session)
    if name == "system":
        session.conversation.system = None if value == RESET else _unquoted(value.strip())
        return session.screen.note(f"system: {session.conversation.system or 'none'}")
    if name == "format":
        return _format(session, value.strip())
    _parameter(session, SAMPLING.get(name, name), value)
    if not name:
        session.screen.note(f"names: {', '.join((*NUMBERS, *FILES, 'system', 'format', *_SWITCHES))}")


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] == '"' else text


def _format(session: Session, value: str) -> None:
    if value != "json":
        raise InvalidRequest(f"format {value!r}", "json, or /set json_schema FILE")
    _change_more(session, {"structured_outputs": StructuredOutputs(json={"type": "object"})})
    session.screen.note("responses are JSON objects; /set noformat ends it")


def _change_more(session: Session, more: dict[str, object]) -> None:
    kept = {name: value for name, value in session.settings.more.items() if name != "structured_outputs"}
    session.settings = replace(session.settings, more={**kept, **more})


def _no_format(session: Session) -> None:
    _change_more(session, {})
    session.screen.note("responses have no set format")


def _figures(session: Session, shown: bool) -> None:
    session.shows_figures = shown
    session.screen.note(f"figures after each response: {'on' if shown else 'off'}")


def _markdown(session: Session, rendered: bool) -> None:
    session.screen.renders = rendered
    session.screen.note(f"Markdown: {'rendered' if rendered else 'shown as it is'}")


def think(session: Session, wanted: str) -> None:
    """Turns thinking on or off, or back to the template's default; "" only shows it. Raises InvalidRequest."""
    session.decide(session.settings.think if not wanted else None if wanted == RESET else wanted == "on")
    state = {None: "the template's default", True: "on", False: "off"}[session.settings.think]
    session.screen.note(f"thinking: {state}")


_SWITCHES: dict[str, Callable[[Session], None]] = {
    "verbose": lambda session: _figures(session, True),
    "quiet": lambda session: _figures(session, False),
    "think": lambda session: think(session, "on"),
    "nothink": lambda session: think(session, "off"),
    "markdown": lambda session: _markdown(session, True),
    "nomarkdown": lambda session: _markdown(session, False),
    "noformat": _no_format,
}


def _parameter(session: Session, name: str, value: str) -> None:
    if name in vars(session.settings) and name in NUMBERS:
        return set_number(session, name, value.strip())
    more, key = dict(session.settings.more), "structured_outputs" if name in FILES else name
    if name and name not in NUMBERS and name not in FILES:
        raise InvalidRequest(f"there is no setting {name!r}", f"one of {', '.join((*NUMBERS, *FILES))}")
    if value.strip() == RESET:
        more.pop(key, None)
    elif value:
        more[key] = structure(name, user_path(value.strip())) if name in FILES else _number(name, value.strip())
    changed = replace(session.settings, more=more)
    changed.params(session.front.info.default_sampling)  # raises for an invalid value
    session.settings = changed
    for known, chosen in more.items() if not name else [(name, more.get(key, RESET))]:
        session.screen.note(f"{known}: {_shown(chosen)}")


def _shown(value: object) -> object:
    if not isinstance(value, StructuredOutputs):
        return value
    return value.grammar if value.grammar is not None else json.dumps(value.json)


def _number(name: str, text: str) -> int | float:
    try:
        return NUMBERS[name](text)
    except ValueError:
        raise InvalidRequest(f"{name} {text!r}", f"give a number, or {RESET}") from None


def set_number(session: Session, name: str, argument: str) -> None:
    """Sets a setting to a value or to its default, or (without an argument) shows it. Raises InvalidRequest."""
    if argument:
        value = None if argument == RESET else _number(name, argument)
        changed = Settings(**{**vars(session.settings), name: value})
        changed.params(session.front.info.default_sampling)  # raises for an invalid value
        session.settings = changed
    value = getattr(session.settings, name)
    session.screen.note(f"{name}: {'default' if value is None else value}")
