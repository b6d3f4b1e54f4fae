"""RollingRestart: replaces the replicas of a server one after another when it is asked to, by SIGHUP."""

from __future__ import annotations

import asyncio
import logging

from kvasir.engine.client import Fleet
from kvasir.errors import KvasirError
from kvasir.serve.hosting.catalogue import Catalogue

log = logging.getLogger("kvasir.serve")


class RollingRestart:
    """grace: seconds for which each replica may finish the requests that it has; then they go on at another one."""

    def __init__(self, catalogue: Catalogue, grace: float):
        self._catalogue = catalogue
        self._grace = grace
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Requests a restart. During one, it requests another one after it, but only one."""
        self._asked.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            for serving in self._catalogue.loaded():
                if isinstance(fleet := serving.front.engine, Fleet):
                    await self._restart(fleet)

    async def _restart(self, fleet: Fleet) -> None:
        log.info("replacing %d replicas", len(fleet.views))
        try:
            await fleet.restart_all(self._grace)
        except KvasirError as error:
            log.error("the replicas could not all be replaced: %s", error)
        except Exception:
            log.exception("the replicas could not all be replaced")
        else:
            log.info("all replicas are new")
