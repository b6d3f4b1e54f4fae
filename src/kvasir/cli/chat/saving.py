"""/save and /load in a chat: conversations in .json files, and sessions as models of the store, as in Ollama."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvasir.cli.chat.conversation import read
from kvasir.cli.chat.session import Session
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions
from kvasir.environment import user_path
from kvasir.errors import InvalidRequest
from kvasir.store.modelfile import Modelfile
from kvasir.store.parameters import SAMPLING
from kvasir.store.store import ModelStore
from kvasir.weights.find import find_model


class OtherModel(Exception):
    """The user continues with another model."""

    def __init__(self, model: str):
        super().__init__(model)
        self.model = model


async def save(session: Session, argument: str) -> None:
    """Raises KvasirError."""
    if not argument:
        raise InvalidRequest(
            "/save needs a name", "for example /save chat.json, or /save NAME for a model of the store"
        )
    if _is_file(argument):
        path = user_path(argument)
        session.conversation.save(path, session.front.info.name)
        return session.screen.note(f"saved {session.conversation.counted} in {path}")
    recipe, left = _recipe(session)
    entry = await asyncio.to_thread(ModelStore(any_path=True).create, argument, recipe, base=Path.cwd())
    session.screen.note(f"the session is the model {entry.name}: kvasir run {argument}")
    if left:
        session.screen.note(f"a model cannot keep these settings: {', '.join(left)}")


async def load(session: Session, argument: str) -> None:
    """Reads a conversation, or raises OtherModel. Raises KvasirError if there is no such file or model."""
    if not argument:
        raise InvalidRequest("/load needs a name", "for example /load chat.json, or /load qwen3:0.6b for another model")
    if argument.endswith(".json") or (_is_file(argument) and _is_text(argument)):
        path = user_path(argument)
        opening = session.conversation.opening
        session.conversation = read(path)
        session.conversation.opening = opening
        return session.screen.note(f"loaded {session.conversation.counted} from {path}")
    options, _ = await asyncio.to_thread(resolve, EngineOptions(argument))
    await asyncio.to_thread(find_model, options.model)  # raises before the present model ends
    raise OtherModel(argument)


def _is_file(name: str) -> bool:
    """Whether the name can only be a file's."""
    return name.endswith(".json") or name.startswith(("/", "./", "../", "~"))


def _is_text(name: str) -> bool:
    return user_path(name).is_file() and not name.endswith(".gguf")


def _recipe(session: Session) -> tuple[Modelfile, list[str]]:
    """The session as the recipe of a model, and the names of settings that recipes do not have."""
    settings = session.settings
    own = {"temperature": settings.temperature, "max_tokens": settings.max_tokens, "seed": settings.seed}
    given = {name: value for name, value in {**settings.more, **own}.items() if value is not None}
    names = {ours: name for name, ours in SAMPLING.items()}
    parameters = {names[name]: value for name, value in given.items() if name in names}
    messages = tuple(message for message in session.conversation.messages() if message["role"] != "system")
    system = session.conversation.system
    base = session.model or session.front.info.name
    return Modelfile((base,), parameters, system=system, messages=messages), sorted(given.keys() - names)
