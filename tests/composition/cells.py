"""A cell: a set of features, the run with all of them on, and its verdict against the plain run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from kvasir.config import EngineOptions
from kvasir.engine.build import build_core
from kvasir.engine.core import EngineCore
from kvasir.errors import KvasirError
from kvasir.text.tokenizer import Tokenizer
from kvasir.types import Request
from tests.composition import models
from tests.composition.beside import Alone
from tests.composition.feature import Feature
from tests.composition.features import DEFAULTS, FEATURES, NAMED, PLAIN, REFUSES
from tests.composition.run import NUM_REQUESTS, Reading, Run, make_requests
from tests.oracle import Answer, Answers, same


@dataclass(frozen=True)
class Verdict:
    """word: "equal" or "refused", with the engine's message. proofs: how often each feature was seen at work."""

    word: str
    message: str = ""
    proofs: tuple[tuple[str, int], ...] = ()


class Cell:
    """`names` of features; what they bring besides and the defaults are added."""

    def __init__(self, names: Iterable[str]):
        self.names = frozenset(names)
        found = {NAMED[name].switch: NAMED[name] for name in sorted(self.names)}
        assert len(found) == len(self.names), f"two positions of one switch: {sorted(self.names)}"
        for name in [b for f in list(found.values()) for b in f.besides] + list(DEFAULTS):
            found.setdefault(NAMED[name].switch, NAMED[name])
        self.features = [f for f in FEATURES if f in found.values()]

    def __repr__(self) -> str:
        return " + ".join(f.name for f in FEATURES if f.name in self.names)

    @property
    def base(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.features if f.base)

    @property
    def refused(self) -> bool:
        """Whether that is expected."""
        on = {f.name for f in self.features}
        return any(a in on and on & b for a, b in REFUSES.items())

    def options(self) -> dict[str, Any]:
        return options_of(self.features)

    def params(self) -> list[dict[str, Any]]:
        """Sampling parameters of its requests. Each asked feature is left out by one of them, so that those who have
        it and those who have not are neighbours; but none is left out by half: its fields are those of all."""
        asked = [f for f in self.features if f.ask]
        return [
            params_of(i, [f for j, f in enumerate(asked) if f.fields or i != (j + 1) % NUM_REQUESTS])
            for i in range(NUM_REQUESTS)
        ]

    def fields(self) -> list[dict[str, Any]]:
        """Further fields of its requests."""
        return [{k: v for f in self.features if f.fields for k, v in f.fields(i).items()} for i in range(NUM_REQUESTS)]

    def run(self, plant: Callable[[EngineCore], None] | None = None) -> Verdict:
        """Raises AssertionError where an answer differs, a feature was not at work, or a refusal is not expected."""
        try:
            found, proofs = self._run(plant)
        except KvasirError as error:
            assert self.refused, f"{self} is refused: {error}"
            return Verdict("refused", str(error))
        same(self._expected(found.requests), found.answers)
        for name, count in proofs:
            assert count > 0, f"{name} was not at work in {self}"
        assert not self.refused, f"{self} is not refused"
        return Verdict("equal", proofs=proofs)

    def _run(self, plant: Callable[[EngineCore], None] | None) -> tuple[Run, tuple[tuple[str, int], ...]]:
        on = {f.name for f in self.features}
        run = Run(
            self.options(),
            seed=zlib.crc32(repr(self).encode()),
            acts=[f.act for f in self.features if f.act],
            together="neighbours" in on,
            streams="streaming" in on,
            plant=plant,
            drafter=next((f.drafter for f in self.features if f.drafter), None),
            expected=lambda request: plain(self.base, request),
            beside=next((f.engines for f in self.features if f.engines is not Alone), Alone)(),
        )
        embed = not any(f.ask for f in self.features)
        run.go(make_requests(run.core, run.tokenizer, self.params(), self.fields(), embed))
        return run, tuple((f.name, int(f.fired(run))) for f in self.features if f.base or f.name in self.names)

    def _expected(self, requests: Iterable[Request]) -> Answers:
        return {key: a for request in requests for key, a in plain(self.base, request).items()}

    def changes_answers(self) -> bool:
        """Whether what is asked makes a difference to the plain answers."""
        core, tokenizer = _plain_engine(self.base)
        asked = make_requests(core, tokenizer, self.params(), self.fields())
        without = make_requests(core, tokenizer, [params_of(i, []) for i in range(NUM_REQUESTS)], self.fields())
        return self._expected(asked) != self._expected(without)


def options_of(features: Iterable[Feature]) -> dict[str, Any]:
    options = dict(PLAIN)
    for feature in sorted(features, key=lambda f: callable(f.options)):
        options.update(feature.options(options) if callable(feature.options) else feature.options)
    return options


def params_of(i: int, asked: Iterable[Feature]) -> dict[str, Any]:
    """Those of request i; every second one is drawn, the others are greedy."""
    params = {"temperature": 2.0 * (i % 2), "seed": 1000 + i, "max_tokens": 7 + i, "ignore_eos": True, "logprobs": 1}
    for feature in asked:
        assert feature.ask
        params.update(feature.ask(params))
    return params


# --- plain runs -------------------------------------------------------------------------------------

_PLAIN: dict[tuple[tuple[str, ...], str], Answers] = {}


def plain(base: tuple[str, ...], request: Request) -> Answers:
    """Its answers alone, one at a time, everything off."""
    key = base, repr(request)
    if key not in _PLAIN:
        engine = _plain_engine(base)
        _PLAIN[key] = {(request.id, i): _alone(*engine, request, i) for i in range(request.params.n)}
    return _PLAIN[key]


@lru_cache(maxsize=4)
def _plain_engine(base: tuple[str, ...]) -> tuple[EngineCore, Tokenizer | None]:
    options = EngineOptions(**options_of(NAMED[name] for name in base))
    return build_core(options), models.tokenizer(options.model, options.tokenizer)


def _alone(core: EngineCore, tokenizer: Tokenizer | None, request: Request, index: int) -> Answer:
    core.add(replace(request, done=tuple(i for i in range(request.params.n) if i != index)))
    reading = Reading(tokenizer, request, streams=False)
    while core.has_work():
        for delta in core.step():
            reading.take(delta)
    core.check()
    return reading.answer
