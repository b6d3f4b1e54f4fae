"""What a command shows while it waits: a spinner with the progress of a load, on a terminal only."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from kvasir.cli.show import plain
from kvasir.engine.async_llm import AsyncLLM
from kvasir.engine.progress import Progress, described
from kvasir.engine.summary import warnings

if TYPE_CHECKING:
    from rich.status import Status


@asynccontextmanager
async def loaded(llm: AsyncLLM) -> AsyncIterator[None]:
    """Starts the engine, with a spinner, and stops it at the end. Raises KvasirError."""
    await start(llm)
    try:
        yield
    finally:
        await llm.stop()


async def start(llm: AsyncLLM) -> None:
    """Starts the engine; a terminal shows how far the load is. Raises KvasirError."""
    name = llm.options.served_model_name or llm.options.model
    with spinner(loading(name)) as status:
        if status is not None:
            llm.on_progress(progress_of(name, status))
        await llm.start()


def loading(name: str) -> str:
    return f"Loading {plain(name)}"


def progress_of(name: str, status: Status) -> Progress:
    """Shows how far the load of a model is."""

    def show(done: int, total: int, kernels: bool = False) -> None:
        status.update(_text(f"{plain(name)}: {described(done, total, kernels)}"))

    return show


def decided(lines: tuple[str, ...], verbose: bool) -> list[str]:
    """What to print of a summary: all of it, or the warnings only."""
    return [f"  {line}" for line in lines] if verbose else warnings(lines)


def print_decided(lines: tuple[str, ...], verbose: bool) -> None:
    """The same, on standard error."""
    for line in decided(lines, verbose):
        print(line, file=sys.stderr)


@contextmanager
def progress_bar(name: str, total: int, still: bool = False) -> Iterator:
    """Yields a function that takes how many of `total` are done. still: nothing is drawn in between, so that a
    measurement has the processors for itself."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    shown = {"console": Console(stderr=True), "transient": True, "disable": not sys.stderr.isatty()}
    with Progress(*columns, auto_refresh=not still, **shown) as bar:
        task = bar.add_task(name, total=total)
        yield lambda done: bar.update(task, completed=done, refresh=still)


@contextmanager
def spinner(text: str) -> Iterator[Status | None]:
    """A spinner on standard error, which disappears at the end; None if that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(_text(text)) as status:
        yield status


def _text(text: str):
    from rich.text import Text

    return Text(text)  # not a str, in which brackets would be markup
