"""An engine behind a Unix socket, in one object, for tests that take any engine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvasir.engine.client import Engine
from kvasir.engine.host import EngineHost
from kvasir.engine.remote import HostAddress, RemoteEngine


class Hosted(RemoteEngine):
    """A RemoteEngine that starts and ends its host and the engine there."""

    def __init__(self, engine: Engine):
        self._folder = tempfile.TemporaryDirectory(dir="/tmp")
        self.there = engine
        self.host = EngineHost(engine)
        super().__init__(HostAddress(Path(self._folder.name) / "s"))

    async def start(self) -> None:
        await self.there.start()
        assert self.address.path
        await self.host.listen_unix(self.address.path)
        await super().start()

    async def stop(self, drain: float = 0.0) -> None:
        await super().stop(drain)
        await self.host.close()
        await self.there.stop()
        self._folder.cleanup()

    async def check(self) -> None:
        await self.there.check()  # type: ignore[attr-defined]
