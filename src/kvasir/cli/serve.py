"""`kvasir serve`: the API process. It starts and supervises the engine processes, and does not import torch."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from kvasir.adapters import by_model, parse_adapters
from kvasir.cli.api_workers import check_workers, serve_by_workers
from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.front_maker import FrontMaker
from kvasir.cli.models import ModelsOptions
from kvasir.cli.opening import ShownStart
from kvasir.cli.operation import OperationOptions
from kvasir.cli.resolve import resolve, with_adapters
from kvasir.config import EngineOptions, check
from kvasir.engine.kv_events import parse_kv_events
from kvasir.engine.load_text import load_text
from kvasir.errors import ConfigError
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
    verbose: bool = False,
) -> None:
    engine = replace(engine, loads_adapters=bool(operation.lora_dir))
    given = dict.fromkeys(models)
    alone = len(given) == 1
    options, entry = resolve(engine) if alone else (engine, None)
    check(options)
    _check(engine, list(given), shelf)
    fleet.check(options, alone)
    check_workers(operation.api_workers, alone)
    if operation.alias and not alone:
        raise ConfigError("an alias is for a server of one model", "copy the model with kvasir cp")
    settings = ServeSettings(
        host=host,
        port=port,
        model_names=(engine.served_model_name or engine.model, *(operation.alias or ())) if alone else (),
        api_keys=tuple(api_keys),
        keys=read_keys(keys) if keys else (),
        keys_file=keys,
        allowed_hosts=tuple(allowed_hosts),
        allowed_origins=tuple(allowed_origins),
        drain=drain,
        replaces_replicas=fleet.several,
        **operation.settings(),
    )
    events = parse_kv_events(fleet.kv_events, host)
    make = FrontMaker(seed, tool_format, reasoning_format, operation.engine_timeout, fleet, events, verbose)
    if alone and operation.api_workers > 1:
        return serve_by_workers(make, options, settings, entry, operation.api_workers)
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
    with ShownStart("the list of models", verbose) as started:
        run_server(several, started)


def _serve_one(make: FrontMaker, options: EngineOptions, settings: ServeSettings, entry: ModelEntry | None) -> None:
    """Serves one model. Its engine loads it while this process loads the text half and imports the server."""
    with ShownStart(settings.model_names[0], make.verbose) as started:
        engine = make.launched(options, started.progress)
        try:
            with ThreadPoolExecutor(1) as thread:
                text = thread.submit(load_text, options)
                from kvasir.serve.hosting.catalogue import OneModel
                from kvasir.serve.server import run as run_server
            run_server(OneModel(make.front(options, engine, *text.result()), settings, entry=entry), started)
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


def _available() -> int:
    return host_memory()[1]


def _has_gpu() -> bool:
    """Whether an engine may choose a GPU. This process cannot see the GPU's memory, since it does not import torch."""
    return Path("/dev/nvidiactl").exists()
