"""The protocol of a worker: one JSON object per line, one reply for each, until stdin ends.

    {"do": "load", "model": ..., "threads": 2, ...}         -> {"ok": {...}, "peak_rss": bytes}
    {"do": "answer", "prompts": [[ids], ...], "new": 128}   -> {"ok": Answer} or {"error": text, "too_short": bool}

`answer` starts all users together, decodes greedily, ignoring end tokens, and reports its times: see `Timeline`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

SHARED = 0.25  # minimum share of the new tokens that is generated while all users run


class TooShort(ValueError):
    """The choices hardly overlap, so they do not measure many users: more new tokens are needed."""


class Timeline:
    """The times of tokens, in seconds from the start. Every user must get `new` tokens.

    first_s: until the last user has its first token, when all prompts are computed.
    decode_tokens, decode_s: from then until the first user gets its last token, so all users run throughout.
    total_s: until the last token.
    """

    def __init__(self, users: int, new: int):
        self._new = new
        self._counts = [0] * users
        self._events: list[tuple[float, int]] = []  # time, tokens
        self._first = [0.0] * users
        self._done = [0.0] * users

    def add(self, time: float, user: int, tokens: int) -> None:
        if not tokens:
            return
        if not self._counts[user]:
            self._first[user] = time
        self._counts[user] += tokens
        self._events.append((time, tokens))
        if self._counts[user] >= self._new:
            self._done[user] = time

    def figures(self) -> dict[str, float]:
        """Raises ValueError if tokens are missing, TooShort if few of them were generated while all users ran."""
        if any(count != self._new for count in self._counts):
            raise ValueError(f"choices have {sorted(set(self._counts))} tokens, not {self._new}")
        begun, ended = max(self._first), min(self._done)
        tokens = sum(tokens for time, tokens in self._events if begun < time <= ended)
        if self._new > 1 and tokens < SHARED * sum(self._counts):
            raise TooShort(f"only {tokens} of {sum(self._counts)} tokens came while all users ran")
        return {"first_s": begun, "decode_tokens": tokens, "decode_s": ended - begun, "total_s": max(self._done)}


def in_step(first_s: float, steps: Sequence[float], users: int) -> dict[str, float]:
    """The same figures for an engine that decodes all users in lockstep. steps: seconds of each step after the
    first."""
    seconds = sum(steps)
    tokens = users * len(steps)
    return {"first_s": first_s, "decode_tokens": tokens, "decode_s": seconds, "total_s": first_s + seconds}


def serve(worker: Any) -> None:
    """Executes each command with the worker's method of that name. Output of the engine goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = {"ok": getattr(worker, command.pop("do"))(**command)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}", "too_short": isinstance(error, TooShort)}
        print(json.dumps({**reply, "peak_rss": peak_rss()}), file=replies)


def peak_rss() -> int:
    """Bytes, of this process and its descendants; 0 if the system does not report them."""
    try:
        return sum(_high_water(pid) for pid in _tree(os.getpid()))
    except OSError:
        return 0


def _tree(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [pid, *(below for child in file.read().split() for below in _tree(int(child)))]


def _high_water(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
