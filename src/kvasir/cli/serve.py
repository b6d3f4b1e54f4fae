"""`kvasir serve`: the API process. It starts and supervises the engine processes, and does not import torch."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvasir.adapters import by_model, parse_adapters
from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.models import ModelsOptions
from kvasir.cli.operation import OperationOptions
from kvasir.cli.replicas import fleet_of
from kvasir.cli.resolve import resolve, with_adapters
from kvasir.config import EngineOptions, check
from kvasir.engine.client import Engine
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_prompts, load_tasks, load_text
from kvasir.engine.progress import described
from kvasir.engine.subprocess import ProcessEngine
from kvasir.errors import ConfigError
from kvasir.fleet.engine import FleetEngine
from kvasir.memory import host_memory
from kvasir.serve.auth.keys import read_keys
from kvasir.serve.hosting.offers import GivenOffers, Offer, StoreOffers, offer_of
from kvasir.serve.settings import ServeSettings
from kvasir.speculation import parse
from kvasir.store.entry import ModelEntry
from kvasir.store.facts import read_details
from kvasir.store.store import ModelStore
from kvasir.weights.find import find_model


def run(
    engine: EngineOptions,
    models: list[str],
    host: str,
    port: int,
    api_keys: list[str],
    keys: Path | None,
    allowed_hosts: list[str],
    allowed_origins: list[str],
    drain: float,
    seed: int | None,
    tool_format: str,
    reasoning_format: str,
    operation: OperationOptions,
    shelf: ModelsOptions,
    fleet: FleetOptions = FleetOptions(),
) -> None:
    given = dict.fromkeys(models)
    alone = len(given) == 1
    options, entry = resolve(engine) if alone else (engine, None)
    check(options)
    _check(engine, list(given), shelf)
    fleet.check(options, alone)
    settings = ServeSettings(
        host=host,
        port=port,
        model_names=(engine.served_model_name or engine.model,) if alone else (),
        api_keys=tuple(api_keys),
        keys=read_keys(keys) if keys else (),
        keys_file=keys,
        allowed_hosts=tuple(allowed_hosts),
        allowed_origins=tuple(allowed_origins),
        drain=drain,
        **operation.settings(),
    )
    make = FrontMaker(seed, tool_format, reasoning_format, operation.engine_timeout, fleet)
    if alone:
        return _serve_one(make, options, settings, entry)
    from kvasir.serve.hosting.model_manager import ModelManager
    from kvasir.serve.server import run as run_server

    store = ModelStore(allowed_roots=shelf.model_root or ())
    adapters = by_model(parse_adapters(engine.lora or ()), list(given))
    each = [_offer(replace(engine, lora=[one.text for one in adapters[ref]] or None), ref) for ref in given]
    offers = GivenOffers(each) if given else StoreOffers(store, engine)
    several = ModelManager(
        offers,
        make,
        settings,
        store=None if given else store,
        keep_alive=shelf.keep_alive,
        max_loaded=shelf.max_loaded_models,
        available=_available if engine.device == "cpu" or not _has_gpu() else lambda: None,
    )
    run_server(several)


def _serve_one(make: FrontMaker, options: EngineOptions, settings: ServeSettings, entry: ModelEntry | None) -> None:
    """Serves one model. Its engine loads it while this process loads the text half and imports the server."""
    engine = make.engine(options, progress=_show_progress if sys.stderr.isatty() else None, patient=True)
    engine.launch()
    try:
        with ThreadPoolExecutor(1) as thread:
            text = thread.submit(load_text, options)
            from kvasir.serve.hosting.catalogue import OneModel
            from kvasir.serve.server import run as run_server
        run_server(OneModel(make.front(options, engine, *text.result()), settings, entry=entry))
    finally:
        engine.abandon()


def _check(engine: EngineOptions, given: list[str], shelf: ModelsOptions) -> None:
    """Raises ConfigError for options that have no effect with these models, or conflict with them."""
    if shelf.max_loaded_models < 1 or not math.isfinite(shelf.keep_alive):
        raise ConfigError("max_loaded_models is below 1, or keep_alive is not a number", "give 1 or more, and seconds")
    if given and shelf.model_root:
        raise ConfigError(
            "model_root applies only to a server of the whole store", "name no model, or leave --model-root out"
        )
    if len(given) == 1:
        return
    if source := parse(engine.speculate).source:
        raise ConfigError(
            f"{source} drafts for a single model, and this server has several", "name one, or leave it out"
        )
    own = ("served_model_name", "tokenizer", "revision", "chat_template", "cache_offer")
    for name in (*own, "transfer_listen", "transfer_peer"):
        if getattr(engine, name) is not None:
            raise ConfigError(
                f"{name} applies to a single model, and this server has several", "name one model, or leave it out"
            )


def _offer(engine: EngineOptions, ref: str) -> Offer:
    """A model from the command line. Raises KvasirError if it is not available; models that are not local are fetched
    from the hub."""
    engine = with_adapters(replace(engine, model=ref))
    options, entry = resolve(engine)
    adapters = parse_adapters(engine.lora or ())
    if entry is not None:
        return replace(offer_of(ModelStore(), entry, engine), name=ref, adapters=adapters)
    files = find_model(ref)
    size = sum(path.stat().st_size for path in files.weights)
    return Offer(ref, ref, size, read_details(files), lambda: options, created=int(time.time()), adapters=adapters)


class FrontMaker:
    """Creates the front of a model, and its engine in a separate process."""

    def __init__(
        self,
        seed: int | None,
        tool_format: str,
        reasoning_format: str,
        engine_timeout: float,
        fleet: FleetOptions = FleetOptions(),
    ):
        """Raises ConfigError if engine_timeout (seconds) is out of range."""
        if not 0.1 <= engine_timeout <= 86400:
            raise ConfigError(f"engine_timeout is {engine_timeout}", "expected seconds in [0.1, 86400]")
        self._engine_timeout = engine_timeout
        self._fleet = fleet
        self._options = {"default_seed": seed, "tool_format": tool_format, "reasoning_format": reasoning_format}

    def engine(self, options: EngineOptions, **more: Any) -> ProcessEngine | FleetEngine:
        """The model's engine, which is not started yet: a process, or several."""
        if self._fleet.most > 1:
            return fleet_of(options, self._fleet, hang_seconds=self._engine_timeout, **more)
        return ProcessEngine(options, hang_seconds=self._engine_timeout, **more)

    def front(self, options: EngineOptions, engine: Engine, *text: Any) -> Front:
        """The front of an engine. text: what load_text returned."""
        given = {
            "trust_special_tokens": options.trust_special_tokens,
            "prompts": load_prompts(options),
            "adapters": (*load_tasks(options), *parse_adapters(options.lora or ())),
        }
        return Front(engine, *text, warm=True, **given, **self._options)

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
        print("\n".join(("loaded", *(f"  {line}" for line in front.summary()))), flush=True)
        return front


def _available() -> int:
    return host_memory()[1]


def _has_gpu() -> bool:
    """Whether an engine may choose a GPU. This process cannot see the GPU's memory, since it does not import torch."""
    return Path("/dev/nvidiactl").exists()


def _show_progress(done: int, total: int, kernels: bool = False) -> None:
    end = "\n" if done >= total else ""
    print(f"\r{described(done, total, kernels)}", end=end, file=sys.stderr, flush=True)
