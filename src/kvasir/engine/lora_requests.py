"""Adapters as programs for vLLM name them: an object with a name and a path, which the first request loads.

llm.generate(prompts, params, lora_request=LoRARequest("sql", 1, "loras/sql"))
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kvasir.adapters import AdapterOption, Lora, check_name
from kvasir.environment import user_path
from kvasir.errors import InvalidRequest, quoted

if TYPE_CHECKING:
    from kvasir.engine.adapter_shelf import AdapterShelf

PARAM = "lora_request"


class NamesAdapter(Protocol):
    """vLLM's LoRARequest, of which these two fields are read, and `load_inplace` if there is one."""

    @property
    def lora_name(self) -> str: ...
    @property
    def lora_path(self) -> str: ...


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """vLLM's, for programs that are run without it. lora_int_id: unused; adapters are told apart by their names.
    load_inplace: the files are read again, and may be others than those of this name so far."""

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    load_inplace: bool = False


class LoraRequests:
    """Loads the adapters of such requests into an engine."""

    def __init__(self, shelf: AdapterShelf):
        self._shelf = shelf
        self._loading = asyncio.Lock()

    async def chosen(self, lora: Lora | None, request: NamesAdapter | None) -> Lora | None:
        """What a request selects: `lora`, or the name of the request's adapter, which is loaded. Raises KvasirError:
        for both, for an object without name and path, and for a name that stands for another path."""
        if request is None:
            return lora
        if lora is not None:
            raise InvalidRequest("both lora and lora_request are given", "give one of them", PARAM)
        name, path = _field(request, "lora_name"), str(user_path(_field(request, "lora_path")).absolute())
        check_name(name, PARAM)
        again = bool(getattr(request, "load_inplace", False))
        async with self._loading:
            known = self._shelf.find(name)
            if known is None or again:
                await self._shelf.load(AdapterOption(name, path), replacing=again)
            elif known.path != path:
                raise InvalidRequest(
                    f"adapter {quoted(name)} is loaded from {quoted(known.path)}, not from {quoted(path)}",
                    "give it a name of its own, or set load_inplace",
                    PARAM,
                )
        return name

    async def chosen_of_each(self, lora: Lora | None, given: Any, count: int) -> list[Lora | None]:
        """The same for each of `count` prompts; every object is loaded once. given: one for all, or a list of one or
        None for each."""
        if isinstance(given, str) or not isinstance(given, Sequence):
            one: Any = given
            return [await self.chosen(lora, one)] * count
        if len(given) != count:
            message = f"{count} prompts and {len(given)} LoRA requests"
            raise InvalidRequest(message, "give one for all prompts, or one or None for each", PARAM)
        distinct = {id(each): each for each in given}
        found = {key: await self.chosen(lora, each) for key, each in distinct.items()}
        return [found[id(each)] for each in given]


def _field(request: NamesAdapter, name: str) -> str:
    value = getattr(request, name, None)
    if not isinstance(value, str) or not value:
        expected = "expected an object with lora_name and lora_path, as kvasir.LoRARequest"
        raise InvalidRequest(f"a LoRA request whose {name} is {quoted(value)}", expected, PARAM)
    return value
