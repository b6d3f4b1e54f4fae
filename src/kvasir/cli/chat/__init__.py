"""`kvasir chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from dataclasses import asdict, replace

from kvasir.adapters import for_all_requests
from kvasir.cli.chat.commands import COMMANDS, obey
from kvasir.cli.chat.conversation import ChatHistory
from kvasir.cli.chat.reader import make_reader
from kvasir.cli.chat.saving import OtherModel
from kvasir.cli.chat.screen import Screen
from kvasir.cli.chat.session import Session, Settings
from kvasir.cli.check import check_asked, check_length
from kvasir.cli.resolve import resolve
from kvasir.cli.sampler import SamplerOptions
from kvasir.cli.waiting import decided, start
from kvasir.config import EngineOptions
from kvasir.engine.async_llm import AsyncLLM
from kvasir.errors import KvasirError, UnsupportedModel
from kvasir.store.entry import ModelEntry
from kvasir.store.parameters import sampling_of
from kvasir.types import ModelInfo, Task

# Options of the model that a chat began with, which do not apply to another.
_OF_ONE_MODEL = {
    **dict.fromkeys(
        ("lora", "tokenizer", "revision", "served_model_name", "chat_template", "rope_scaling", "hf_overrides")
    ),
    "speculate": "auto",
}


def run(
    engine: EngineOptions,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    seed: int | None,
    sampler: SamplerOptions = SamplerOptions(),
    verbose: bool = False,
) -> None:
    """Chats until the input ends, with the models that the user chooses one after another. Raises KvasirError."""
    while True:
        options, entry = resolve(replace(engine, lora=for_all_requests(engine.lora)))
        own = sampling_of(entry.parameters) if entry else {}
        settings = Settings(temperature, max_tokens, seed, own=own, more=sampler.params())
        check_length(options, settings.params({}).max_tokens)  # also raises for a value out of range
        conversation = ChatHistory(system)
        if entry is not None:
            conversation = ChatHistory(system or entry.system, opening=entry.messages)
        llm = AsyncLLM(**asdict(options), launch=True)
        chosen = talk(llm, conversation, settings, entry, engine.model, verbose)
        if chosen is None:
            return
        engine, system = replace(engine, model=chosen, **_OF_ONE_MODEL), None


def talk(
    llm: AsyncLLM,
    conversation: ChatHistory,
    settings: Settings,
    entry: ModelEntry | None = None,
    model: str = "",
    verbose: bool = False,
) -> str | None:
    """Loads the model and chats until the input ends; returns the model to go on with, if the user chose another.
    Raises KvasirError if the model cannot chat.

    Input is read between runs of the event loop, so that Ctrl-C has one meaning at a time: during an answer it ends
    that answer (asyncio.Runner turns it into a cancellation), at the prompt it discards the line.
    """
    try:
        check_asked(llm.front, settings.params({}), chat=True)
    except BaseException:
        llm.abandon()
        raise
    screen = Screen()
    with asyncio.Runner() as runner:
        try:
            runner.run(start(llm))
            if Task.GENERATE not in llm.info.tasks:
                raise UnsupportedModel(
                    f"{llm.info.name} computes embeddings and does not generate text", "choose another model"
                )
            for line in decided(llm.summary, verbose):
                screen.note(line)
            if sys.stdin.isatty():
                screen.note(_greeting(llm.info))
            return _loop(runner, Session(llm.front, screen, conversation, settings, entry, model))
        finally:
            runner.run(llm.stop())


def _greeting(info: ModelInfo) -> str:
    return (
        f"{info.name}, {info.dtype} on {info.device}, context {info.max_model_len}. /? lists the commands, /bye exits."
    )


def _loop(runner: asyncio.Runner, session: Session) -> str | None:
    read = make_reader(list(COMMANDS))
    while True:
        try:
            line = read()
            if line.strip():
                runner.run(_turn(session, line))
        except EOFError:
            return None
        except OtherModel as chosen:
            return chosen.model
        except KeyboardInterrupt:
            session.screen.note("[Ctrl-D or /bye exits]")
        except KvasirError as error:
            session.screen.error(error)


async def _turn(session: Session, line: str) -> None:
    turn: Awaitable[None]
    if line.startswith("/") and not line.startswith("//"):
        turn = obey(session, line)
    else:
        turn = session.ask(line.removeprefix("/") if line.startswith("//") else line)
    await turn
