"""The conversation of a chat, and how it is saved to and loaded from a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError

MAX_FILE_BYTES = 16 << 20


class ConversationError(KvasirError):
    """A file is not a saved conversation, or cannot be read or written."""


@dataclass
class ChatHistory:
    """Questions with their answers, and a system prompt. opening: messages that the model's own recipe puts before
    them; they are not saved."""

    system: str | None = None
    turns: list[tuple[str, str]] = field(default_factory=list)
    opening: Sequence[dict[str, str]] = ()

    @property
    def counted(self) -> str:
        return f"{len(self.turns)} exchange{'s' * (len(self.turns) != 1)}"

    def messages(self, question: str | None = None) -> list[dict[str, str]]:
        """The messages for the chat template, with a new question last."""
        return self._messages(self.opening, question)

    def _messages(self, opening: Sequence[dict[str, str]], question: str | None) -> list[dict[str, str]]:
        history = [{"role": "system", "content": self.system}] if self.system is not None else []
        history += opening
        for asked, answered in self.turns:
            history += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return history if question is None else [*history, {"role": "user", "content": question}]

    def save(self, path: Path, model: str) -> None:
        """Writes {"model", "messages"}. Raises ConversationError instead of overwriting a file that is not a saved
        conversation."""
        if path.exists():
            read(path)
        text = json.dumps({"model": model, "messages": self._messages((), None)}, indent=2, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}"
            raise ConversationError(problem, "name another file") from error


def read(path: Path) -> ChatHistory:
    """The conversation in a file that `save` wrote. Raises ConversationError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConversationError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "it is not valid JSON"
        raise ConversationError(f"{path} cannot be read: {reason}", "name a file that /save wrote") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise ConversationError(f"{path} holds no list of messages", "name a file that /save wrote")
    return _from_messages(messages, path)


def _from_messages(messages: list[dict[str, str]], path: Path) -> ChatHistory:
    has_system = bool(messages) and messages[0]["role"] == "system"
    history = messages[has_system:]
    expected = ["user", "assistant"] * (len(history) // 2)
    if [message["role"] for message in history] != expected:
        raise ConversationError(f"in {path} user and assistant messages do not alternate", "name another file")
    texts = [message["content"] for message in history]
    return ChatHistory(messages[0]["content"] if has_system else None, list(zip(texts[::2], texts[1::2], strict=True)))


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
