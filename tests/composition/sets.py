"""Which cells are run: all pairs, the sets that people really run, and larger ones by chance."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

from tests.composition.cells import Cell
from tests.composition.features import DEFAULTS, FEATURES, together

# Configurations that users run, with the reason why they are here.
REAL: dict[str, tuple[str, ...]] = {
    "a chat server under load": ("neighbours", "steps of 29 tokens", "overlap", "streaming", "temperature", "top-p"),
    "a laptop's chat, from a GGUF file": ("kvasir-mini Q4_K_M", "2 threads", "streaming", "stop strings"),
    "a crowded server": ("neighbours", "tiny pool", "2 threads", "overlap", "n", "service classes"),
    "long contexts in little memory": ("KV int8", "tiny pool", "chunks of 13"),
    "quantized while loading, with a small cache": ("q4", "KV int8", "neighbours"),
    "clients that leave": ("abort of neighbours", "streaming", "overlap"),
    "an engine that dies in the middle of streams": ("restart", "streaming", "stop strings", "neighbours"),
    "an engine that dies between the answers of a request": ("restart", "n", "temperature"),
    "best of n": ("n", "temperature", "logprobs", "neighbours"),
    "scores of a data set": ("prompt logprobs", "neighbours", "chunks of 13"),
    "scores while others are preempted": ("prompt logprobs", "logprobs", "forced preemption"),
    "no word twice": ("repetition penalty", "presence penalty", "frequency penalty", "n", "forced preemption"),
    "all filters at once": ("temperature", "top-k", "top-p", "min-p", "logit bias"),
    "ends of all kinds": ("stop ids", "stop strings", "min tokens", "streaming"),
    "sliding windows, chunks and reused blocks": ("mistral", "chunks of 13", "blocks of 16", "tiny pool"),
    "two kinds of layers in a small cache": ("gemma3", "blocks of 16", "tiny pool", "KV int8"),
    "a mixture on all cores": ("mixtral", "3 threads", "neighbours", "q8"),
    "many experts, preempted": ("qwen3-moe", "forced preemption", "2 threads"),
    "the reference executor under load": ("eager executor", "neighbours", "tiny pool", "overlap"),
    "recurrent layers under load": ("qwen3-next", "neighbours", "forced preemption", "chunks of 13"),
    "recurrent layers after a crash": ("qwen3-next", "restart", "streaming"),
    "a batch of texts to embed": ("bert", "neighbours", "2 threads", "tiny pool"),
    "conversations that outlive a server": (
        "prefix: on disk, of an engine before",
        "neighbours",
        "streaming",
        "overlap",
    ),
    "more conversations than memory": ("prefix: on disk", "evictions: lru", "temperature", "overlap"),
    "disk and int8, with windows": ("prefix: on disk", "gemma3", "KV int8", "forced preemption"),
    "recurrent layers from disk": ("prefix: on disk, of an engine before", "qwen3-next", "chunks of 13"),
    "tenants that may not see each other": ("prefix: all of one's own", "neighbours", "tiny pool", "service classes"),
    "chats over background work": ("classes displaced", "overlap", "n", "tiny pool"),
    "chats over background work, from disk": ("classes displaced", "prefix: on disk", "streaming"),
    "clients with little time": ("deadlines of neighbours", "classes displaced", "overlap", "streaming"),
    "a system prompt that stays": ("pins", "prefix: a part", "evictions: priority", "overlap"),
    "a draft model under load": ("drafts: a model", "neighbours", "steps of 29 tokens", "overlap", "streaming"),
    "a draft model of recurrent layers": ("drafts: a model", "qwen3-next", "forced preemption", "chunks of 13"),
    "an agent that repeats itself": ("drafts: lookup", "prefix: a part", "n", "streaming", "overlap"),
    "drafts in a crowded server that dies": ("drafts", "restart", "tiny pool", "temperature", "neighbours"),
    "drafters that no one should trust": ("drafts: hostile", "min tokens", "stop ids", "logprobs", "n"),
    "an adapter for each tenant": ("adapter", "prefix: all of one's own", "tiny pool", "overlap", "streaming"),
    "more adapters than memory, and a crash": ("adapter: little room", "tiny pool", "restart", "overlap"),
    "whatever peft trains, over a GGUF file": (
        "adapter: everything",
        "kvasir-mini Q4_K_M",
        "drafts: lookup",
        "2 threads",
    ),
    "an adapter that is trained anew": ("adapter: reloaded", "prefix: on disk", "n", "streaming"),
    "an adapter for the end of a chat": ("adapter: from a later position", "chunks of 13", "grammar: schema", "n"),
    "adapters of several skills": (
        "adapters summed",
        "drafts: a model",
        "forced preemption",
        "qwen3-moe",
        "prefix: a part",
    ),
    "a fleet under load": ("replicas: 2", "neighbours", "overlap", "streaming", "tiny pool", "n"),
    "a fleet of which a replica dies": ("replicas: 2", "restart", "prefix: a part", "temperature"),
    "prompts and answers on engines of their own": ("hand-over", "neighbours", "overlap", "logprobs", "streaming"),
    "prompts and answers apart, with adapters": ("hand-over", "adapters summed", "n", "grammar: schema"),
    "ranks that hand over": ("ranks: 2", "hand-over", "KV int8", "neighbours"),
    "a model larger than memory, for many": (
        "streamed weights",
        "neighbours",
        "drafts: lookup",
        "overlap",
        "streaming",
    ),
    "stages that stream their layers": ("stages: 2", "streamed weights", "chunks of 13", "adapter", "restart"),
    "nothing that is stale is seen": ("NaN in free blocks", "tiny pool", "overlap", "forced preemption"),
}
SEED, COUNT = 2025, 240  # of the random sets


def pairs() -> list[Cell]:
    """Each feature alone, and every pair that can be chosen."""
    alone = [Cell([f.name]) for f in FEATURES]
    two = [(a.name, b.name) for a, b in combinations(FEATURES, 2) if a.switch != b.switch]
    return alone + [Cell(names) for names in two if together(names)]


def real() -> list[Cell]:
    return [Cell(names) for names in REAL.values()]


def some(seed: int = SEED, count: int = COUNT) -> list[Cell]:
    """Sets of three to nine features that no engine refuses."""
    rng, cells = random.Random(seed), []
    while len(cells) < count:
        cell = draw(rng, rng.randint(3, 9))
        if not cell.refused and together(cell.names):
            cells.append(cell)
    return cells


def sample(times: int, seed: int = SEED) -> list[Cell]:
    """Few cells in which each feature is at least `times` times."""
    rng, cells = random.Random(seed), []
    seen: Counter[str] = Counter({name: times for name in DEFAULTS})
    while missing := [f.name for f in FEATURES if seen[f.name] < times]:
        cell = draw(rng, 5, [rng.choice(missing)], missing if len(missing) > 9 else None)
        if not cell.refused and together(cell.names):
            cells.append(cell)
            seen.update(cell.names)
    return cells


def draw(rng: random.Random, size: int, first: list[str] = [], among: list[str] | None = None) -> Cell:  # noqa: B006
    """A set of about that size, of one position each of some switches."""
    positions: dict[str, list[str]] = {}
    for feature in FEATURES:
        if among is None or feature.name in among:
            positions.setdefault(feature.switch, []).append(feature.name)
    chosen = [f for f in FEATURES if f.name in first]
    others = [s for s in positions if s not in {f.switch for f in chosen}]
    more = rng.sample(others, min(len(others), size - len(first)))
    return Cell([*first, *(rng.choice(positions[switch]) for switch in more)])
