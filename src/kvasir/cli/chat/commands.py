"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from kvasir.cli.chat.conversation import read
from kvasir.cli.chat.session import Session, Settings
from kvasir.cli.sampler import FILES, NUMBERS, structure
from kvasir.errors import InvalidRequest
from kvasir.types import StructuredOutputs

RESET = "default"


@dataclass(frozen=True)
class Command:
    """`argument` is the argument's name in the help; `run` receives the text after the command unchanged."""

    run: Callable[[Session, str], Awaitable[None]]
    help: str
    argument: str = ""


async def obey(session: Session, line: str) -> None:
    """Runs a line that begins with a slash. Raises KvasirError, and EOFError to leave the chat."""
    word, _, argument = line.strip().partition(" ")
    if word not in COMMANDS:
        raise InvalidRequest(f"there is no command {word}", "/help lists them; // begins a text with a slash")
    await COMMANDS[word].run(session, argument.strip())


async def _help(session: Session, argument: str) -> None:
    note = session.screen.note
    for name, command in COMMANDS.items():
        note(f"  {name + ' ' + command.argument:<18} {command.help}")
    note("A line that ends with a backslash continues in the next one; Esc-Enter begins a new line too (with")
    note("prompt_toolkit). Ctrl-C stops the response and keeps the text so far, Ctrl-D exits.")


async def _exit(session: Session, argument: str) -> None:
    raise EOFError


async def _clear(session: Session, argument: str) -> None:
    session.conversation.turns.clear()
    session.screen.note("conversation cleared; the system prompt is kept")


async def _system(session: Session, argument: str) -> None:
    if argument:
        session.conversation.system = None if argument == RESET else argument
    system = session.conversation.system
    session.screen.note(f"system: {system}" if system is not None else "there is no system prompt")


async def _temperature(session: Session, argument: str) -> None:
    _set(session, "temperature", argument)


async def _max(session: Session, argument: str) -> None:
    _set(session, "max_tokens", argument)


async def _seed(session: Session, argument: str) -> None:
    _set(session, "seed", argument)


async def _setting(session: Session, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if name in vars(session.settings) and name in NUMBERS:
        return _set(session, name, value.strip())
    more, key = dict(session.settings.more), "structured_outputs" if name in FILES else name
    if name and name not in NUMBERS and name not in FILES:
        raise InvalidRequest(f"there is no setting {name!r}", f"one of {', '.join((*NUMBERS, *FILES))}")
    if value.strip() == RESET:
        more.pop(key, None)
    elif value:
        more[key] = structure(name, _path(value.strip(), "/set")) if name in FILES else _number(name, value.strip())
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


async def _think(session: Session, argument: str) -> None:
    if not session.can_think:
        raise InvalidRequest(
            "this model's chat template has no switch for thinking", "ask for it in the prompt instead"
        )
    if argument not in ("", "on", "off", RESET):
        raise InvalidRequest(f"/think {argument}", "use on, off or default")
    if argument:
        session.settings.think = None if argument == RESET else argument == "on"
    state = {None: "the template's default", True: "on", False: "off"}[session.settings.think]
    session.screen.note(f"thinking: {state}")


async def _save(session: Session, argument: str) -> None:
    path = _path(argument, "/save")
    session.conversation.save(path, session.front.info.name)
    session.screen.note(f"{len(session.conversation.turns)} exchanges are in {path}")


async def _load(session: Session, argument: str) -> None:
    path = _path(argument, "/load")
    opening = session.conversation.opening
    session.conversation = read(path)
    session.conversation.opening = opening
    session.screen.note(f"{len(session.conversation.turns)} exchanges from {path}")


async def _retry(session: Session, argument: str) -> None:
    if session.settings.seed is not None or session.settings.temperature == 0:
        session.screen.note("the seed or the temperature is fixed, so the response will be the same; see /seed")
    await session.retry()


async def _undo(session: Session, argument: str) -> None:
    if not session.conversation.turns:
        raise InvalidRequest("there is nothing to undo", "ask something first")
    question, _ = session.conversation.turns.pop()
    session.screen.note(f"removed: {question}")


async def _stats(session: Session, argument: str) -> None:
    note, info = session.screen.note, session.front.info
    engine = await session.front.stats()
    note(f"model    {info.name}: {info.architecture}, {info.dtype} on {info.device}, {info.grade}")
    note(f"chat     {len(session.conversation.turns)} exchanges")
    note(f"last     {session.figures.text(info.max_model_len) if session.figures else 'no response yet'}")
    tokens = f"{engine.prompt_tokens} prompt and {engine.generated_tokens} output tokens"
    note(f"engine   {tokens} in {engine.steps} steps")
    note(f"KV       {engine.blocks_used} of {engine.blocks_total} blocks of {engine.block_size} in use")


def _set(session: Session, name: str, argument: str) -> None:
    """Sets a setting to a value or to its default, or (without an argument) shows it. Raises InvalidRequest."""
    if argument:
        value = None if argument == RESET else _number(name, argument)
        changed = Settings(**{**vars(session.settings), name: value})
        changed.params(session.front.info.default_sampling)  # raises for an invalid value
        session.settings = changed
    value = getattr(session.settings, name)
    session.screen.note(f"{name}: {'default' if value is None else value}")


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise InvalidRequest(f"{command} needs a file", f"for example {command} chat.json")
    return Path(argument).expanduser()


COMMANDS = {
    "/help": Command(_help, "this list"),
    "/exit": Command(_exit, "exit (Ctrl-D)"),
    "/clear": Command(_clear, "start a new conversation"),
    "/undo": Command(_undo, "remove the last question and its response"),
    "/retry": Command(_retry, "regenerate the last response"),
    "/system": Command(_system, "set the system prompt (default: none), or show it", "TEXT"),
    "/think": Command(_think, "turn thinking on or off, if the template supports it", "on|off"),
    "/temperature": Command(_temperature, "set the temperature; 0 is greedy, default is the model's own", "X"),
    "/max": Command(_max, "limit the output tokens; default is what the context leaves", "N"),
    "/seed": Command(_seed, "same seed, same response; default is a random seed each time", "N"),
    "/set": Command(_setting, "set a sampling parameter, or json_schema or grammar from a file", "NAME X"),
    "/save": Command(_save, "save the conversation as JSON", "FILE"),
    "/load": Command(_load, "continue a saved conversation", "FILE"),
    "/stats": Command(_stats, "statistics of the last response and of the engine"),
}
