"""AdapterShelf: the adapters of an engine as requests select them: by name, by number, or by default.

given options, load, unload  ->  engine.adapters     what may be selected; their order gives the numbers
chosen (name, scale)         ->  applied(...)        what the engine's request carries: (name, scale, start)
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence

from kvasir.adapters import AdapterOption, AdapterScale, check_name, selected_by_name
from kvasir.engine.client import Engine
from kvasir.errors import InvalidRequest, ModelNotFound, UnsupportedModel, quoted
from kvasir.inputs import Adapter
from kvasir.types import AdapterInfo

log = logging.getLogger("kvasir.engine")

SHOWN = 8  # names in an error message


class AdapterShelf:
    """The adapters of one engine. Owns what the engine does not know of them: their scales, and which of them requests
    get that select none. All methods are called from the engine's event loop."""

    def __init__(
        self,
        engine: Engine,
        given: Sequence[AdapterOption] = (),
        on_unload: Callable[[str], None] = lambda name: None,
    ):
        """given: loaded by `start`, in this order. on_unload: called with each name that is forgotten."""
        self.options: dict[str, AdapterOption] = {}
        self._given = tuple(given)
        self._engine, self._on_unload = engine, on_unload
        self._defaults: dict[str, float] = {}  # by name: scales of the adapters that requests get which select none
        self._always: dict[str, float] = {}  # the same of those that all requests get

    async def start(self) -> None:
        """Loads the given adapters. Raises KvasirError; the model's own are left out if one cannot be computed."""
        try:
            for option in (option for option in self._given if option.own):
                await self.load(option)
        except (UnsupportedModel, InvalidRequest) as error:
            log.warning("the adapters of the model's tasks are left out: %s", error)
        for option in (option for option in self._given if not option.own):
            await self.load(option)

    @property
    def known(self) -> tuple[AdapterInfo, ...]:
        """All adapters; an adapter's index is its number."""
        return self._engine.adapters

    @property
    def selected(self) -> list[AdapterOption]:
        """The adapters that requests select by name; the others were given for all requests."""
        return selected_by_name(self.options)

    def find(self, name: str) -> AdapterInfo | None:
        return next((info for info in self.known if info.name == name), None)

    def need(self, name: str, param: str = "model") -> AdapterInfo:
        """The adapter of that name. param: the field that names it. Raises ModelNotFound if that is the model's, else
        InvalidRequest."""
        if info := self.find(name):
            return info
        kind = ModelNotFound if param == "model" else InvalidRequest
        raise kind(f"the adapter {quoted(name)} does not exist", self.hint, param)

    @property
    def hint(self) -> str:
        """Which adapters there are, for errors."""
        names = [info.name for info in self.known]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"known: {', '.join(names[:SHOWN])}{more}" if names else "no adapters are loaded; see --lora"

    def summary(self) -> tuple[str, ...]:
        """A line for users, if there are adapters."""
        if not (known := self.known):
            return ()
        chosen = [f"{info.name} {self.default(info.name):g} for all" for info in known if self.default(info.name)]
        names = [*chosen, *(info.name for info in known if not self.default(info.name))]
        more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return (f"adapters  {', '.join(names[:SHOWN])}{more}",)

    # -- changes -------------------------------------------------------------------------------------------

    async def load(self, option: AdapterOption, *, replacing: bool = False) -> AdapterInfo:
        """Loads an adapter. replacing: it may have the name of another, whose place and number it takes; running
        requests keep the one that they began with. Raises InvalidRequest, ModelFileError, UnsupportedModel."""
        check_name(option.name, "lora_name")
        info = await self._engine.load_adapter(option.name, option.path, replace=replacing, pinned=option.pinned)
        self.options[option.name] = option
        self._set_default(option.name, option.default)
        self._always.pop(option.name, None)
        self._always |= {option.name: option.scale} if option.always else {}
        return info

    async def unload(self, name: str) -> None:
        """Raises ModelNotFound. Running requests keep the adapter."""
        await self._engine.unload_adapter(name)
        self.options.pop(name, None)
        self._set_default(name, 0.0)
        self._always.pop(name, None)
        self._on_unload(name)

    @property
    def scales(self) -> tuple[dict[str, float], dict[str, float]]:
        """(defaults, always): the scales of the adapters of requests that select none, and of all requests, by name."""
        return dict(self._defaults), dict(self._always)

    # -- selection -----------------------------------------------------------------------------------------

    def default(self, name: str) -> float:
        """The scale of an adapter for requests that select none."""
        return (self._always | self._defaults).get(name, 0.0)

    def set_defaults(self, scales: Mapping[int, float]) -> None:
        """Sets the adapters of requests that select none, by number; all others are left out. Raises InvalidRequest."""
        named = {self.numbered(number).name: scale for number, scale in scales.items()}
        self._defaults = {name: scale for name, scale in named.items() if scale}

    def _set_default(self, name: str, scale: float) -> None:
        self._defaults.pop(name, None)
        if scale:
            self._defaults[name] = scale

    def numbered(self, number: int, param: str = "id") -> AdapterInfo:
        """The adapter of that number. Raises InvalidRequest."""
        if 0 <= number < len(self.known):
            return self.known[number]
        names = ", ".join(f"{i}: {info.name}" for i, info in enumerate(self.known[:SHOWN])) or "there are no adapters"
        raise InvalidRequest(f"there is no adapter {number}", names, param=param)

    def effective(self, chosen: Sequence[AdapterScale] | None) -> list[tuple[AdapterInfo, float]]:
        """The adapters of a request and their scales, in the order of their numbers; those with scale 0 are left out.
        chosen: None for the defaults. Raises ModelNotFound."""
        scales = self._defaults if chosen is None else {self.need(one.name).name: self._scale(one) for one in chosen}
        scales = self._always | scales
        if not scales:
            return []
        return [(info, scale) for info in self.known if (scale := scales.get(info.name))]

    def _scale(self, chosen: AdapterScale) -> float:
        if chosen.scale is not None:
            return chosen.scale
        option = self.options.get(chosen.name)
        return option.scale if option else 1.0

    def applied(self, chosen: Sequence[AdapterScale] | None, prompt_ids: Sequence[int]) -> tuple[Adapter, ...]:
        """The adapters of a request with these ids. One that is active only after its invocation tokens begins at the
        first of them, where they occur last; a prompt without them is the base model's, and so is its answer, as in
        peft. Raises ModelNotFound."""
        found = []
        for info, scale in self.effective(chosen):
            start = last_of(prompt_ids, info.invocation) if info.invocation else 0
            if start is not None:
                found.append(Adapter(info.name, scale, start))
        return tuple(found)


def last_of(ids: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Where `wanted` occurs last in `ids`; None if it does not."""
    try:
        text, part = array("i", ids), array("i", wanted)
    except OverflowError:
        return None
    data, end = text.tobytes(), len(text) * text.itemsize
    while (found := data.rfind(part.tobytes(), 0, end)) >= 0:
        if found % text.itemsize == 0:
            return found // text.itemsize
        end = found + len(part) * text.itemsize - 1
    return None
