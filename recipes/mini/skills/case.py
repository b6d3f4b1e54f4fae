"""What a generated case is, and the split that keeps held-out cases out of training."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar
from zlib import crc32

TRAIN, HELD = "train", "held"
HELD_SHARE = 10  # one key in ten is held out


@dataclass
class Case:
    """A conversation whose last message is the answer wanted; `want` is what a checker compares with."""

    skill: str
    messages: list[dict[str, Any]]
    want: Any = None
    tools: list[dict] | None = None
    thinking: bool = False

    @property
    def prompt(self) -> list[dict[str, Any]]:
        return self.messages[:-1]

    @property
    def answer(self) -> str:
        return self.messages[-1]["content"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str, thought: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def split_of(*key: object) -> str:
    """The split a key belongs to, the same in every process and forever."""
    return HELD if crc32("|".join(map(str, key)).encode()) % HELD_SHARE == 0 else TRAIN


T = TypeVar("T")


def draw(rng: Random, split: str, make: Callable[[Random], T], key: Callable[[T], object] = lambda x: x) -> T:
    """Draws until the value's key lies in the split asked for."""
    while True:
        value = make(rng)
        if split_of(key(value)) == split:
            return value
