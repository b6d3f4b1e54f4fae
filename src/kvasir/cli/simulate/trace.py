"""Traces of services' requests, without the texts: arrival times, lengths, and shared prefixes of prompts.

    azure       .csv: TIMESTAMP, ContextTokens, GeneratedTokens
    mooncake    .jsonl: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens of the prompt)

A prompt is made of runs of a repeated id, one run for each block of the trace: equal blocks are equal runs, and
different blocks differ in their first token. It is created when it is due, and all tokens of a run share one object.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path

from kvasir.errors import ConfigError

BLOCK = 512  # tokens of a prompt for each of its hash ids
LONGEST = 1 << 24  # tokens; a longer prompt indicates a broken file
MOST = 1 << 30  # limit of hash ids


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. at: seconds since the first request. prompt, answer: lengths in tokens. blocks: names of the
    prompt's prefixes, one for each BLOCK tokens; () if no other prompt shares a prefix with it."""

    at: float
    prompt: int
    answer: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[Asked]:
    """The first `limit` requests, in the order of their arrival. Raises ConfigError."""
    reader = {".csv": _azure, ".jsonl": _mooncake}.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path.name} is not a trace", "expected Azure's .csv or Mooncake's .jsonl")
    found: list[Asked] = []
    number = 0
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            for number, asked in enumerate(reader(lines), 1):
                found.append(_checked(asked))
                if limit and number == limit:
                    break
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "give a trace") from error
    except (ValueError, KeyError, TypeError, OverflowError, csv.Error, RecursionError) as error:
        raise ConfigError(
            f"{path.name}, request {number + 1}: {error!r}", "the line does not have the trace's format"
        ) from error
    if not found:
        raise ConfigError(f"{path.name} holds no request", "give another trace")
    found.sort(key=lambda a: a.at)
    return [Asked(a.at - found[0].at, a.prompt, a.answer, a.blocks) for a in found]


def _azure(lines: Iterable[str]) -> Iterator[Asked]:
    for row in csv.DictReader(lines):
        at = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
        yield Asked(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _mooncake(lines: Iterable[str]) -> Iterator[Asked]:
    for line in lines:
        row = json.loads(line)
        yield Asked(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))


def _checked(a: Asked) -> Asked:
    """The request with at least one prompt token and one output token, as engines require. Raises ValueError."""
    if not (0 <= a.at < 1e12 and 0 <= a.prompt <= LONGEST and 0 <= a.answer <= LONGEST):
        raise ValueError(f"a time or a length out of range: {a.at}, {a.prompt}, {a.answer}")
    if a.blocks and len(a.blocks) != -(-a.prompt // BLOCK):
        raise ValueError(f"{len(a.blocks)} hash ids for {a.prompt} tokens")
    if any(not isinstance(b, int) or not 0 <= b < MOST for b in a.blocks):
        raise ValueError("a hash id is not a small integer")
    return Asked(a.at, max(1, int(a.prompt)), max(1, int(a.answer)), a.blocks)


class Prompts:
    """The ids of a trace's prompts. vocab_size: covers all of them and `answer_id`, which is in no prompt."""

    def __init__(self, trace: list[Asked]):
        self._trace = trace
        self._own = 1 + max((max(a.blocks, default=-1) for a in trace), default=-1)  # first id for unshared prompts
        self.answer_id = self._own + len(trace)
        self.vocab_size = self.answer_id + 1

    def ids(self, index: int) -> tuple[int, ...]:
        asked = self._trace[index]
        if not asked.blocks:
            return (self._own + index,) * asked.prompt
        runs = chain.from_iterable(repeat(b, BLOCK) for b in asked.blocks[:-1])
        return (*runs, *repeat(asked.blocks[-1], asked.prompt - BLOCK * (len(asked.blocks) - 1)))


def ideal_hits(trace: list[Asked]) -> int:
    """Prompt tokens that an unlimited cache with blocks of one token finds if each request is complete before the next
    one arrives: the longest prefix shared with an earlier prompt, minus the one token that is always computed."""
    seen: dict[tuple[int, int], tuple[int, int]] = {}  # (place of the previous block, id) -> place, its most tokens
    hits = 0
    for asked in trace:
        place, shared, going = 0, 0, True
        for i, block in enumerate(asked.blocks):
            size = min(BLOCK, asked.prompt - i * BLOCK)
            found, most = seen.get((place, block), (len(seen) + 1, 0))
            shared += min(most, size) if going else 0
            going = going and most >= size
            seen[place, block] = found, max(most, size)
            place = found
        hits += min(shared, asked.prompt - 1)
    return hits
