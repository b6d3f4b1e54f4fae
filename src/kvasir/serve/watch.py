"""Watch: files that are read again when they change, while the server continues."""

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

PAUSE = 1.0  # seconds between two looks


class Watch:
    """reload: where it raises, nothing has changed. outcomes: counts (name, "ok" or "failed")."""

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
        """Has the files read at once, changed or not."""
        self._asked.set()

    async def run(self) -> None:
        """Until it is cancelled. The files are read first of all, since they may have changed while models loaded."""
        seen = None
        while True:
            # The files' state is taken before they are read: what comes in between is seen the next time.
            now = await asyncio.to_thread(_state, self._files)
            if now != seen or self._asked.is_set():
                self._asked.clear()
                seen = now if await self._read() else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._asked.wait(), self._pause)

    async def _read(self) -> bool:
        """False: it is to be tried again, though nothing changes."""
        try:
            await self._reload()
        except ConfigError as error:
            log.error("%s; what was read before stays in force", error)
            self._outcomes[self._name, "failed"] += 1
        except Exception:  # no descriptor is left, say
            log.exception("%s could not be read again; what was read before stays in force", self._name)
            self._outcomes[self._name, "failed"] += 1
            return False
        else:
            self._outcomes[self._name, "ok"] += 1
        return True


def _state(files: Sequence[Path]) -> list[tuple[int, ...] | None]:
    """What changes when a file does."""
    return [_state_of(file) for file in files]


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        facts = os.stat(file)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
