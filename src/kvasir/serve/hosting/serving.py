"""Serving: a model of the server, with the settings and limits that apply to it."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvasir import __version__
from kvasir.adapters import AdapterScale
from kvasir.engine.front import Bound, Front
from kvasir.engine.meter import RequestWatch
from kvasir.serve.auth.quota import Quotas
from kvasir.serve.hosting.lookout import Lookout
from kvasir.serve.settings import ServeSettings
from kvasir.serve.telemetry import access, traces
from kvasir.store.entry import ModelEntry
from kvasir.store.parameters import sampling_of


class Serving:
    """One model of a server: its front half, with the settings applied. Routes get it from `catalogue.serving_of`.
    entry: the model's entry in the store, None if it is not from there. chosen: the adapters of requests that name no
    others; None for the server's defaults."""

    chosen: tuple[AdapterScale, ...] | None = None
    _asked: str | None = None  # the name that the request uses, if it is an adapter's
    _content = ""  # hash of the adapter that this name means

    def __init__(self, front: Front, settings: ServeSettings, quotas: Quotas, entry: ModelEntry | None = None):
        self.front = front
        self.entry = entry
        self.settings = settings
        self.quotas = quotas
        self.lookout = Lookout(front)
        self.created = int(time.time())
        front.on_tokens = quotas.answer
        front.reader.thinks = settings.reasoning
        front.meter.on_end = self._note

    def _note(self, watch: RequestWatch) -> None:
        for telemetry in (access, traces):
            telemetry.note(self.names[0], watch)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; responses carry the first."""
        if self._asked is not None:
            return (self._asked,)
        if self.settings.model_names or self.entry is None:
            return self.settings.model_names or (self.front.info.name,)
        return tuple(dict.fromkeys((self.entry.name, self.entry.name.removesuffix(":latest"))))

    def adapted(self, adapter: str, asked: str | None = None, param: str = "model") -> Serving:
        """The same model with an adapter for its requests. asked: the name that responses carry; None for the model's.
        param: the field that names the adapter. Raises as `AdapterShelf.need`."""
        other = copy.copy(self)
        other._content = self.front.adapters.need(adapter, param).content
        other.chosen = (AdapterScale(adapter),)
        other._asked = asked or self._asked
        return other

    @property
    def own(self) -> dict[str, Any]:
        """Defaults of SamplingParams from the model's store entry, which requests may override."""
        return sampling_of(self.entry.parameters) if self.entry else {}

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages of a chat, preceded by those of the model's store entry."""
        return self.entry.conversation(messages) if self.entry else messages

    @property
    def fingerprint(self) -> str:
        """Changes when results may change: with the version, the model or the way it is computed."""
        info = self.front.info
        facts = (__version__, info.name, info.dtype, info.device, info.executor, info.grade, info.numerics)
        if self.chosen is None:
            facts += tuple((one.content, scale) for one, scale in self.front.adapters.effective(None))
        else:
            facts += (self._content,)
        return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:10]

    async def ids_of(
        self, prompt: str | list[int], add_special_tokens: bool | None, param: str, bound: Bound = "context"
    ) -> Sequence[int]:
        """The ids of a prompt. A text gets special tokens unless that is declined; ids are returned unchanged. bound:
        as in `Front.encode`."""
        if not isinstance(prompt, str):
            return prompt
        special = add_special_tokens is not False
        return await self.front.encode(prompt, add_special_tokens=special, param=param, bound=bound)
