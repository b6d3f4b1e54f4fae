"""`kvasir batch`: answers the lines of a file in the format of OpenAI's batches."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvasir.cli.batch_job import BatchJob, open_input
from kvasir.cli.fleet_options import FleetOptions
from kvasir.cli.front_maker import FrontMaker
from kvasir.cli.resolve import resolve
from kvasir.config import EngineOptions, check
from kvasir.data.checkpoint import Checkpoint
from kvasir.data.identity import model_identity
from kvasir.engine.load_text import load_text
from kvasir.errors import ConfigError
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import OneModel
from kvasir.serve.records.batches.call import Caller
from kvasir.serve.settings import ServeSettings

ENGINE_TIMEOUT = 20.0  # seconds, as of `kvasir serve`


def run(
    engine: EngineOptions,
    fleet: FleetOptions,
    file: Path,
    output: Path,
    checkpoint: Path | None,
    width: int | None,
    seed: int | None,
    tool_format: str,
    reasoning_format: str,
    quiet: bool,
) -> None:
    options, entry = resolve(engine)
    check(options)
    fleet.check(options, True)
    settings = ServeSettings(model_names=(engine.served_model_name or engine.model,), batch_width=width)
    folder = checkpoint or output.with_name(f"{output.name}.checkpoint")
    with open_input(file) as source, _alone(folder) as kept:
        make = FrontMaker(seed, tool_format, reasoning_format, ENGINE_TIMEOUT, fleet)
        launched = make.launched(options)
        try:
            front = make.front(options, launched, *load_text(options))
            catalogue = OneModel(front, settings, entry=entry)

            async def work() -> BatchJob:
                await catalogue.start()
                try:
                    facts = [model_identity(options, front.info), str(seed), catalogue.loaded()[0].fingerprint]
                    facts.append(str(front.info.weight_bytes_read))  # engines elsewhere may have other options
                    with _bar(source, quiet) as on_line:
                        job = BatchJob(catalogue, Caller(create_app(catalogue)), kept, "\n".join(facts), width, on_line)
                        await job.run(source)
                    await asyncio.to_thread(job.write, source, output)
                    return job
                finally:
                    await catalogue.stop()

            job = asyncio.run(work())
        except KeyboardInterrupt:
            print("\nstopped; the same command continues the job", file=sys.stderr)
            sys.exit(130)
        except OSError as error:
            raise ConfigError(f"{output}: {error.strerror}", "the same command continues the job") from None
        finally:
            launched.abandon()
    if checkpoint is None and not job.broken:
        shutil.rmtree(folder)
    if not quiet:
        before = f" ({job.kept} lines by an earlier run)" if job.kept else ""
        print(f"{job.completed} lines completed, {job.failed} failed{before}: {output}", file=sys.stderr)
        if job.broken:
            print(f"the same command tries {job.broken} of these again, and no other", file=sys.stderr)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[Checkpoint]:
    """The checkpoint in a folder that no other run uses. Raises ConfigError."""
    checkpoint = Checkpoint(folder)
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another run writes to {folder}", "wait for it, or give another output") from None
        yield checkpoint
    finally:
        checkpoint.close()
        os.close(lock)


@contextlib.contextmanager
def _bar(source, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar of the finished lines on a terminal; what it is advanced by."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    total = sum(1 for line in source if line.strip())
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("lines", total=total)
        yield lambda: bar.advance(task)
