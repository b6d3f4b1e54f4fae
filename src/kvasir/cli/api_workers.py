"""`kvasir serve --api-workers N`: this process is the main process of N API workers."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from kvasir.cli.front_maker import FrontMaker
from kvasir.cli.opening import ShownStart
from kvasir.config import EngineOptions
from kvasir.engine.load_text import load_text
from kvasir.errors import ConfigError
from kvasir.serve.settings import ServeSettings
from kvasir.serve.workers.spec import MAX_WORKERS, WorkerSpec, encode
from kvasir.store.entry import ModelEntry

MODULE = "kvasir.cli.api_worker"


class ApiWorkerSpec(msgspec.Struct, frozen=True):
    """What an API worker is told at its start. options: of the model. The other fields are FrontMaker's."""

    worker: WorkerSpec
    options: EngineOptions
    seed: int | None
    tool_format: str
    reasoning_format: str
    engine_timeout: float


def check_workers(count: int, alone: bool) -> None:
    """Raises ConfigError. alone: whether the server has a single model."""
    if not 1 <= count <= MAX_WORKERS:
        raise ConfigError(f"api_workers is {count}", f"expected 1 to {MAX_WORKERS}")
    if count > 1 and not alone:
        raise ConfigError("api_workers apply to a single model, and this server has several", "name one model")


def serve_by_workers(
    make: FrontMaker, options: EngineOptions, settings: ServeSettings, entry: ModelEntry | None, count: int
) -> None:
    """Serves one model by `count` API workers until the end. Raises KvasirError."""
    with ShownStart(settings.model_names[0], make.verbose) as started:
        launched = make.launched(options, started.progress)
        try:
            from kvasir.serve.hosting.catalogue import OneModel
            from kvasir.serve.server import run_in_loop
            from kvasir.serve.workers.main_process import MainProcess

            text, created = make.text, int(time.time())

            def spec(number: int, listener: int, *, engine: Path, main: Path) -> bytes:
                paths = str(engine), str(main)
                worker = WorkerSpec(number, count, listener, *paths, created, settings, entry)
                formats = text["tool_format"], text["reasoning_format"]
                return encode(ApiWorkerSpec(worker, options, text["default_seed"], *formats, make.engine_timeout))

            catalogue = OneModel(make.front(options, launched, *load_text(options)), settings, entry=entry)
            run_in_loop(MainProcess(catalogue, count, MODULE, spec, make.engine_timeout).serve(started))
        finally:
            launched.abandon()
