"""`kvasir serve`: the API process. It starts and supervises the engine process, and imports no torch itself."""

from __future__ import annotations

import sys
from pathlib import Path

from kvasir.cli.operation import OperationOptions
from kvasir.config import EngineOptions, check
from kvasir.engine.front import Front
from kvasir.engine.load_text import load_text
from kvasir.engine.subprocess import ProcessEngine
from kvasir.serve.catalogue import OneModel
from kvasir.serve.keys import read_keys
from kvasir.serve.server import run as run_server
from kvasir.serve.settings import ServeSettings


def run(
    engine: EngineOptions,
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
) -> None:
    check(engine)
    settings = ServeSettings(
        host=host,
        port=port,
        model_names=(engine.served_model_name,) if engine.served_model_name else (),
        api_keys=tuple(api_keys),
        keys=read_keys(keys) if keys else (),
        keys_file=keys,
        allowed_hosts=tuple(allowed_hosts),
        allowed_origins=tuple(allowed_origins),
        drain=drain,
        **operation.settings(),
    )
    tokenizer, template = load_text(engine)
    formats = {"tool_format": tool_format, "reasoning_format": reasoning_format}
    process = ProcessEngine(engine, progress=_show_progress if sys.stderr.isatty() else None)
    front = Front(process, tokenizer, template, default_seed=seed, **formats)
    run_server(OneModel(front, settings))


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done >= total else ""
    print(f"\rloading {done / 2**20:.0f} of {total / 2**20:.0f} MiB", end=end, file=sys.stderr, flush=True)
