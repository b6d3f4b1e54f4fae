"""FrontMaker: the fronts of a server's models, and their engines in processes."""

from __future__ import annotations

import asyncio
from typing import Any

from kvasir.adapters import parse_adapters
from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.replicas import fleet_of, remote_fleet_of
from kvasir.cli.show import plain
from kvasir.cli.waiting import decided
from kvasir.config import EngineOptions, check
from kvasir.engine.client import Engine
from kvasir.engine.front import Front
from kvasir.engine.kv_events import KvEvents, KvEventsConfig
from kvasir.engine.load_text import load_prompts, load_tasks, load_text
from kvasir.engine.progress import Progress
from kvasir.engine.publishing import PublishingEngine
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine


class FrontMaker:
    """Creates the front of a model, and its engine in a separate process."""

    def __init__(
        self,
        seed: int | None,
        tool_format: str,
        reasoning_format: str,
        engine_timeout: float,
        fleet: FleetOptions = FleetOptions(),
        events: KvEventsConfig | None = None,
        verbose: bool = False,
    ):
        """events: how changes of prefix caches are published. verbose: whether all is printed that an engine decides.
        Raises ConfigError if engine_timeout (seconds) is out of range."""
        if not 0.1 <= engine_timeout <= 86400:
            raise ConfigError(f"engine_timeout is {engine_timeout}", "expected seconds in [0.1, 86400]")
        self.engine_timeout = engine_timeout
        self.verbose = verbose
        self._fleet, self._events = fleet, events
        self.text: dict[str, Any] = {
            "default_seed": seed,
            "tool_format": tool_format,
            "reasoning_format": reasoning_format,
        }

    def engine(self, options: EngineOptions, **more: Any) -> ProcessEngine | FleetEngine:
        """The model's engine, which is not started yet: a process, or several."""
        if self._fleet.replica:
            return remote_fleet_of(options, self._fleet)
        if self._fleet.several:
            return fleet_of(options, self._fleet, events=self._events, hang_seconds=self.engine_timeout, **more)
        if self._events:
            return PublishingEngine(options, events=KvEvents(self._events), hang_seconds=self.engine_timeout, **more)
        return ProcessEngine(options, hang_seconds=self.engine_timeout, **more)

    def launched(self, options: EngineOptions, progress: Progress | None = None) -> ProcessEngine | FleetEngine:
        """The same for a server of one model, already launched."""
        engine = self.engine(options, progress=progress, patient=True)
        engine.launch()
        return engine

    def front(self, options: EngineOptions, engine: Engine, *text: Any) -> Front:
        """The front of an engine. text: what load_text returned."""
        given = {
            "trust_special_tokens": options.trust_special_tokens,
            "prompts": load_prompts(options),
            "adapters": (*load_tasks(options), *parse_adapters(options.lora or ())),
        }
        return Front(engine, *text, warm=True, **given, **self.text)

    async def __call__(self, options: EngineOptions) -> Front:
        """A started front. Raises KvasirError."""
        check(options)
        engine = self.engine(options)
        engine.launch()
        try:
            front = self.front(options, engine, *await asyncio.to_thread(load_text, options))
        except BaseException:
            engine.abandon()
            raise
        await front.start()
        name = plain(options.served_model_name or options.model)
        print("\n".join((f"loaded {name}", *decided(front.summary(), self.verbose))), flush=True)
        return front
