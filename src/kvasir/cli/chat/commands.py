"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvasir.cli.chat.facts import show
from kvasir.cli.chat.saving import load, save
from kvasir.cli.chat.session import Session
from kvasir.cli.chat.settings import RESET, set_number, set_value, think
from kvasir.errors import InvalidRequest


@dataclass(frozen=True)
class Command:
    """`argument` is the argument's name in the help; `run` receives the text after the command unchanged."""

    run: Callable[[Session, str], Awaitable[None]]
    help: str
    argument: str = ""


async def obey(session: Session, line: str) -> None:
    """Runs a line that begins with a slash. Raises KvasirError, EOFError to leave the chat, and OtherModel."""
    word, _, argument = line.strip().partition(" ")
    word = _ALIASES.get(word, word)
    if word not in COMMANDS:
        raise InvalidRequest(f"there is no command {word}", "/? lists them; // begins a text with a slash")
    await COMMANDS[word].run(session, argument.strip())


async def _help(session: Session, argument: str) -> None:
    note = session.screen.note
    for name, command in COMMANDS.items():
        note(f"  {name + ' ' + command.argument:<22} {command.help}")
    note('Begin and end a text of several lines with """, or end a line with a backslash, or begin one with Esc-Enter.')
    note("The arrow keys edit the line and recall earlier ones.")
    note("Ctrl-C stops the response and keeps the text so far, Ctrl-D exits.")


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
    set_number(session, "temperature", argument)


async def _max(session: Session, argument: str) -> None:
    set_number(session, "max_tokens", argument)


async def _seed(session: Session, argument: str) -> None:
    set_number(session, "seed", argument)


async def _think(session: Session, argument: str) -> None:
    if argument not in ("", "on", "off", RESET):
        raise InvalidRequest(f"/think {argument}", "use on, off or default")
    think(session, argument)


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
    note(f"chat     {session.conversation.counted}")
    note(f"last     {session.figures.text(info.max_model_len) if session.figures else 'no response yet'}")
    tokens = f"{engine.prompt_tokens} prompt and {engine.generated_tokens} output tokens"
    note(f"engine   {tokens} in {engine.steps} steps")
    note(f"KV       {engine.blocks_used} of {engine.blocks_total} blocks of {engine.block_size} in use")


COMMANDS = {
    "/set": Command(set_value, "set a parameter, or show them all; /set alone lists what can be set", "NAME [VALUE]"),
    "/show": Command(show, "show info, parameters, system, template, license or modelfile", "WHAT"),
    "/load": Command(load, "continue with another model, or with a conversation from a .json file", "MODEL|FILE"),
    "/save": Command(save, "save the session as a model of the store, or as a .json file", "NAME|FILE"),
    "/clear": Command(_clear, "start a new conversation"),
    "/undo": Command(_undo, "remove the last question and its response"),
    "/retry": Command(_retry, "regenerate the last response"),
    "/system": Command(_system, "set the system prompt (default: none), or show it", "TEXT"),
    "/think": Command(_think, "turn thinking on or off, if the template supports it", "on|off"),
    "/temperature": Command(_temperature, "set the temperature; 0 is greedy, default is the model's own", "X"),
    "/max": Command(_max, "limit the output tokens; default is what the context leaves", "N"),
    "/seed": Command(_seed, "same seed, same response; default is a random seed each time", "N"),
    "/stats": Command(_stats, "statistics of the last response and of the engine"),
    "/help": Command(_help, "this list (also /?)"),
    "/bye": Command(_exit, "exit (also /exit and Ctrl-D)"),
}
_ALIASES = {"/?": "/help", "/exit": "/bye", "/quit": "/bye"}
