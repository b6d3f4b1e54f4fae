"""Whether a model fits into memory, and what to expect if its weights must be streamed from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvasir.cli.model_facts import Needs, cache_bytes
from kvasir.cli.show import bytes_text
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError
from kvasir.weights.local import ModelFiles

CONTEXT = 1024  # tokens of each user
_KV_SHARE = 0.9  # of the memory that weights leave, as `resolve` takes


@dataclass(frozen=True, slots=True)
class StreamingFacts:
    """free: bytes of memory. weights: bytes of all, which are not streamed if `fits`. budget: bytes that streamed
    weights take. kept: of the `layers`, those that stay in memory. per_step: bytes that a step reads. rate: bytes per
    second of the model's disk, 0 if unknown. users: at once, with contexts of CONTEXT tokens. problem: why the model
    cannot even be streamed. processes: ranks and stages, whose bytes are added up."""

    free: int
    weights: int
    fits: bool
    budget: int = 0
    layers: int = 0
    kept: int = 0
    per_step: int = 0
    rate: float = 0.0
    users: int = 0
    problem: str = ""
    processes: int = 1

    @property
    def seconds(self) -> float:
        """Seconds that a step takes at least."""
        return self.per_step / self.rate if self.rate else 0.0

    def tokens_per_second(self, users: int) -> float:
        """At most; 0 if the disk's rate is unknown."""
        return users / self.seconds if self.seconds else 0.0


def read_streaming(
    files: ModelFiles, needs: Needs, weights_memory: int | None = None, ranks: int = 1, stages: int = 1
) -> StreamingFacts | None:
    """The facts for this machine, None for a model that does not run as a program. Reads a part of the model's file if
    it would be streamed, to measure the disk. Raises ConfigError for a budget that is too small, and for a model with
    too few layers for the stages."""
    from kvasir.memory import host_memory
    from kvasir.models.registry import model_class_for
    from kvasir.runner.allotment import allot, budget_of
    from kvasir.runner.foresight import foresee
    from kvasir.runner.load import open_checkpoint
    from kvasir.runner.streaming import split_layers

    if needs.executor != "program":
        return None
    config, source = open_checkpoint(files)
    try:
        kind: Any = model_class_for(config)
        model = kind(kind.Config.from_hf(config))
        parts = foresee(config, source, needs.auto_dtype, ranks, stages)
    finally:
        source.close()
    free, weights, count = host_memory()[1], sum(part.all for part in parts), len(parts)
    budget = budget_of(weights, free, weights_memory)
    if not budget:
        return StreamingFacts(free, weights, fits=True, processes=count)
    try:
        budgets = allot(parts, free, weights_memory)
    except ConfigError as error:
        if weights_memory:
            raise
        return StreamingFacts(free, weights, False, budget, problem=error.message, processes=count)
    splits = [split_layers(part.layers, given - part.fixed) for part, given in zip(parts, budgets, strict=True)]
    streamed = [split.streamed if split else () for split in splits]
    per_step = sum(part.layers[i] for part, chosen in zip(parts, streamed, strict=True) for i in chosen)
    layers = sum(len(part.layers) for part in parts[::ranks])
    kept = layers - sum(max(map(len, streamed[first : first + ranks])) for first in range(0, count, ranks))
    rate, users = _rate(files), _users(model, needs.auto_dtype, free - budget)
    return StreamingFacts(free, weights, False, budget, layers, kept, per_step, rate, users, processes=count)


def _rate(files: ModelFiles) -> float:
    from kvasir.weights.read_rate import read_rate

    try:
        return read_rate(max(files.weights, key=lambda path: path.stat().st_size))
    except OSError:  # a file system that has no direct reads
        return 0.0


def _users(model: Any, dtype: str, left: int) -> int:
    from kvasir.program.cache import cache_groups

    options = EngineOptions("")
    one = cache_bytes(cache_groups(model.cache_spec(), options.block_size, dtype), options.block_size, CONTEXT)
    return max(1, min(options.max_num_seqs, int(left * _KV_SHARE) // max(one, 1)))


def streaming_dict(facts: StreamingFacts) -> dict[str, Any]:
    """The facts as plain values; sizes in bytes."""
    value: dict[str, Any] = {
        "free_memory": facts.free,
        "weights": facts.weights,
        "fits": facts.fits,
        "processes": facts.processes,
    }
    if facts.fits or facts.problem:
        return value | ({"problem": facts.problem} if facts.problem else {})
    return value | {
        "weights_memory": facts.budget,
        "layers": facts.layers,
        "layers_in_memory": facts.kept,
        "bytes_per_step": facts.per_step,
        "disk_bytes_per_second": facts.rate or None,
        "seconds_per_step": facts.seconds or None,
        "tokens_per_second": {str(users): facts.tokens_per_second(users) for users in {1, facts.users} if facts.rate},
    }


def streaming_lines(facts: StreamingFacts) -> Iterator[str]:
    """The facts for users."""
    of = f" of {facts.processes} processes" if facts.processes > 1 else ""
    if facts.fits:
        yield f"the weights{of}, {bytes_text(facts.weights)}, fit into memory: {bytes_text(facts.free)} are free"
        return
    if facts.problem:
        yield f"{bytes_text(facts.free)} of memory are free: {facts.problem}"
        return
    yield (
        f"the weights{of}, {bytes_text(facts.weights)}, are streamed through {bytes_text(facts.budget)} of memory: "
        f"{facts.kept} of {facts.layers} layers stay, and a step reads {bytes_text(facts.per_step)}"
    )
    if not facts.rate:
        yield "how fast the disk reads could not be measured"
        return
    yield (
        f"the model's disk reads {bytes_text(facts.rate)} per second: a step takes at least {facts.seconds:.2f} s, for "
        "any number of users"
    )
    for users in sorted({1, facts.users}):
        who = "user" if users == 1 else f"users, with {CONTEXT} tokens each"
        yield f"at most {facts.tokens_per_second(users):.2f} tokens per second for {users} {who}"
