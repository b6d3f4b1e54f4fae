"""OpenRequests: the requests that generate at present, by the names that their clients know, so that they can be
aborted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from starlette.requests import Request as HTTPRequest

from kvasir.engine.front import Front
from kvasir.serve.hosting.serving import Serving
from kvasir.types import Request


@dataclass(eq=False, slots=True)
class OpenRequest:
    """An HTTP request. names: its X-Request-Id, the id of its response, and what its body calls it. ids: of its
    requests in the engine."""

    front: Front
    names: set[str] = field(default_factory=set)
    ids: list[str] = field(default_factory=list)

    async def abort(self) -> None:
        for id in self.ids:
            await self.front.engine.abort(id)


class OpenRequests:
    """Those of one process. All methods run on the event loop of the server."""

    def __init__(self) -> None:
        self._open: dict[OpenRequest, None] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._open)

    def add(self, one: OpenRequest) -> None:
        self._open[one] = None

    def remove(self, one: OpenRequest) -> None:
        del self._open[one]

    async def abort(self, name: str | None) -> int:
        """Aborts the requests that have this name, or all (None). Returns how many there were."""
        found = [one for one in self._open if name is None or name in one.names]
        for one in found:
            await one.abort()
        return len(found)


def make_abortable(asked: HTTPRequest, serving: Serving, requests: Sequence[Request], names: Collection[str]) -> None:
    """Lets the requests of an HTTP request be aborted by its names until its response is written. The state may have
    `engine_ids`: other ids of the same requests in the engine."""
    state = asked.scope["state"]
    own = [request.id for request in requests]
    one = OpenRequest(serving.front, {state["request_id"], *own, *names}, [*own, *state.get("engine_ids", ())])
    everything: OpenRequests = asked.app.state.open_requests
    everything.add(one)
    leases: AsyncExitStack = state["leases"]
    leases.callback(everything.remove, one)
