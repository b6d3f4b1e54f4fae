"""Engines of one model beside each other, between which requests move as between the replicas of a fleet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir.config import EngineOptions
from kvasir.engine.core import EngineCore
from kvasir.types import Request, Task, Transfer
from tests.composition import models
from tests.kv._tiers import until

if TYPE_CHECKING:
    from tests.composition.run import Run


class Alone:
    """One engine, which has all requests."""

    def options(self, options: EngineOptions) -> list[EngineOptions]:
        """Those of each engine."""
        return [options]

    def built(self, engines: Sequence[EngineCore]) -> None:
        """Takes note of engines that compute from now on."""

    def home(self, run: Run, request: Request) -> int:
        """The engine to which a request goes first."""
        return 0

    def routed(self, run: Run, request: Request) -> Request:
        """The request as its engine gets it."""
        return request

    def act(self, run: Run) -> None:
        """Is called before each step."""

    def idle(self) -> None:
        """Is called after a step in which nothing was planned."""


class Replicas(Alone):
    """Two engines, which get requests in turn. Some request moves to the other one: at the first chance, and then a
    dozen times more."""

    def options(self, options: EngineOptions) -> list[EngineOptions]:
        if not options.cache_dir:
            return [options, options]
        return [replace(options, cache_dir=str(Path(options.cache_dir) / f"replica-{i}")) for i in range(2)]

    def home(self, run: Run, request: Request) -> int:
        return len(run.homes) % 2

    def act(self, run: Run) -> None:
        able = [name for name in run.under_way if run.begun(name)]
        run.movable += len(able)
        if able and (not run.moved or (run.moved < 12 and run.random.random() < 0.25)):
            run.move(run.random.choice(able))


class HandOver(Alone):
    """The first engine computes prompts and first tokens, the second continues the answers with the blocks that the
    first one sends it."""

    def __init__(self) -> None:
        self._address = ""
        self._sent: dict[str, str] = {}  # the transfer under way of a request's prompt
        self._numbers = count()

    def options(self, options: EngineOptions) -> list[EngineOptions]:
        self._address = str(Path(models.fresh_folder()) / "blocks")
        first, second = Replicas().options(options)
        return [
            replace(first, role="prefill", transfer_peer=[self._address]),
            replace(second, role="decode", transfer_listen=self._address),
        ]

    def built(self, engines: Sequence[EngineCore]) -> None:
        self._sent.clear()
        found = [core.scheduler.tiering.exchange for core in engines]
        until(lambda: all(exchange and exchange.ready for exchange in found))

    def home(self, run: Run, request: Request) -> int:
        return int(not self.starts(run, request))

    @staticmethod
    def starts(run: Run, request: Request) -> bool:
        """Whether the first engine computes its prompt."""
        goes_on = request.task is Task.GENERATE and request.params.max_tokens != 1
        return goes_on and not request.no_cache and len(request.prompt_ids) >= run.block_size

    def routed(self, run: Run, request: Request) -> Request:
        if run.homes[request.id]:
            transfer = self._sent.pop(request.id, None)
            return replace(request, takes=Transfer(transfer)) if transfer else request
        if request.resume_ids or not self.starts(run, request):
            return request
        transfer = self._sent[request.id] = f"{request.id} {next(self._numbers)}"
        return replace(request, sends=Transfer(transfer, self._address))

    def act(self, run: Run) -> None:
        for name in run.under_way:
            if not run.homes[name] and run.begun(name):
                run.move(name)

    def idle(self) -> None:
        time.sleep(0.001)  # blocks are on their way
