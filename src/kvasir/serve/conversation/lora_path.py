"""`lora_path`, of SGLang: the name of an adapter for all prompts of a request, or one or null for each of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request as HTTPRequest

from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.scheduling import LoraScale, chosen_adapters
from kvasir.serve.hosting.catalogue import adapted
from kvasir.serve.hosting.serving import Serving

PARAM = "lora_path"
Path = str | Sequence[str | None] | None


def for_all(path: Path) -> str | None:
    """The adapter of all prompts; None if there is none, or if each has its own."""
    return path if isinstance(path, str) else None


async def fields_of_each(
    path: Path,
    lora: Sequence[LoraScale] | None,
    fields: dict[str, Any],
    count: int,
    serving: Serving,
    request: HTTPRequest,
) -> list[dict[str, Any]]:
    """The fields of the engine's request for each of `count` prompts: those of all, with its own adapter. lora: the
    request's field, which goes before `lora_path`. Raises InvalidRequest."""
    if path is None or isinstance(path, str):
        return [fields] * count
    if len(path) != count:
        message = f"lora_path has {len(path)} names for {count} prompts"
        raise InvalidRequest(message, "give one name for all, or one or null for each", param=PARAM)
    each = [await adapted(request, serving, name, f"{PARAM}.{i}") for i, name in enumerate(path)]
    return [{**fields, "adapters": chosen_adapters(lora, one)} for one in each]
