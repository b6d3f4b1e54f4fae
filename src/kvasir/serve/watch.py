"""Watch: reloads files when they change, while the server runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from kvasir.errors import ConfigError

log = logging.getLogger("kvasir.serve")

PAUSE = 1.0  # seconds between two checks


class FileWatch:
    """reload: must leave everything unchanged if it raises. outcomes: counts (name, "ok" or "failed")."""

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        reload: Callable[[], Awaitable[None]],
        outcomes: Counter[tuple[str, str]],
        pause: float = PAUSE,
    ):
        self._name = name
        self._files = files
        self._reload = reload
        self._outcomes = outcomes
        self._pause = pause
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Requests a reload at once, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Runs until cancelled. Reads the files at the start, since they may have changed while models loaded."""
        seen = None
        while True:
            # The files' state is taken before they are read, so a change in between is detected in the next round.
            now = await asyncio.to_thread(_state, self._files)
            if now != seen or self._asked.is_set():
                self._asked.clear()
                seen = now if await self._read() else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._pause)

    async def _read(self) -> bool:
        """Reloads the files. False: to be retried, even without a change."""
        try:
            await self._reload()
        except ConfigError as error:
            log.error("%s; the previous version stays in force", error)
            self._outcomes[self._name, "failed"] += 1
        except Exception:  # for example, if no file descriptor is left
            log.exception("%s could not be reloaded; the previous version stays in force", self._name)
            self._outcomes[self._name, "failed"] += 1
            return False
        else:
            self._outcomes[self._name, "ok"] += 1
        return True


def _state(files: Sequence[Path]) -> list[tuple[int, ...] | None]:
    """Values that change when a file changes."""
    return [_state_of(file) for file in files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
