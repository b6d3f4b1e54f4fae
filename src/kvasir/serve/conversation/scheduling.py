"""When a request is scheduled, in which class, which cache it shares, and with which adapters it is computed: fields
that all dialects have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HTTPRequest

from kvasir.adapters import MAX_CHOSEN, MAX_SCALE, AdapterScale
from kvasir.errors import InvalidRequest
from kvasir.serve.auth.keys import Key
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.faults import ClassNotAllowed
from kvasir.serve.http.wire import Int32, Name, Salt, Wire
from kvasir.types import ServiceClass

CLASS_HEADER = "x-kvasir-class"


class LoraScale(Wire):
    """An adapter and its scale, by its number in GET /lora-adapters, as in llama.cpp, or by its name."""

    id: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    name: Name | None = None
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE, allow_inf_nan=False)] = 1.0


class Scheduling(Wire):
    """When a request is scheduled, which cache it shares, and its adapters.

    service_class: None for the key's. deadline: seconds until which the response must be complete. cache_salt: requests
    with different salts share no cached prefixes; no_cache: the request shares none at all. cache_ttl: seconds for
    which the prompt is kept in the cache. lora: the adapters that apply, instead of that of the model's name or of the
    server's own; [] for none.
    """

    service_class: Literal["interactive", "batch", "background"] | None = None
    priority: Int32 | None = None
    deadline: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    cache_salt: Salt | None = None
    no_cache: bool | None = None
    cache_ttl: Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)] | None = None
    lora: Annotated[list[LoraScale], Field(max_length=MAX_CHOSEN)] | None = None


def scheduling_fields(
    wire: Scheduling, serving: Serving, request: HTTPRequest, tier: ServiceClass | None = None
) -> dict[str, Any]:
    """The fields of an engine request besides prompt and parameters: tenant, class, scheduling and adapters.

    tier: the class that a dialect's own field stands for. Raises InvalidRequest, ClassNotAllowed.
    """
    key: Key | None = request.scope["state"].get("key")
    return {
        "slo": service_class(wire.service_class, tier, request.headers.get(CLASS_HEADER), key),
        "priority": wire.priority or 0,
        "tenant": key.name if key else "",
        "weight": key.weight if key else 1.0,
        "deadline": wire.deadline,
        "cache_salt": _namespace(key, wire.cache_salt, serving.settings.share_cache),
        "no_cache": bool(wire.no_cache),
        "cache_ttl": wire.cache_ttl,
        "adapters": chosen_adapters(wire.lora, serving),
        "trace": request.scope["state"].get("traceparent", ""),
    }


def chosen_adapters(lora: Sequence[LoraScale] | None, serving: Serving) -> tuple[AdapterScale, ...] | None:
    """The adapters that a request selects; None for the server's own. Raises ModelNotFound, InvalidRequest."""
    if lora is None:
        return serving.chosen
    adapters, found = serving.front.adapters, {}
    for i, one in enumerate(lora):
        match one.id, one.name:
            case int(number), None:
                info = adapters.numbered(number, f"lora.{i}.id")
            case None, str(name):
                info = adapters.need(name, f"lora.{i}.name")
            case _:
                raise InvalidRequest("an adapter needs either an id or a name", "give one of them", param=f"lora.{i}")
        found[info.name] = AdapterScale(info.name, one.scale)
    return tuple(found.values())


def service_class(field: str | None, tier: ServiceClass | None, header: str | None, key: Key | None) -> ServiceClass:
    """The class of a request: from its field, otherwise its tier, its header, its key. Raises InvalidRequest for a
    header that names no class, ClassNotAllowed for a class above the key's best."""
    try:
        asked = ServiceClass(field) if field else tier or (ServiceClass(header.strip().lower()) if header else None)
    except ValueError:
        names = ", ".join(c.value for c in ServiceClass)
        raise InvalidRequest(f"{CLASS_HEADER} is {header!r:.80}", f"expected one of {names}", CLASS_HEADER) from None
    if key is None:
        return asked or ServiceClass.INTERACTIVE
    if asked and asked.rank < key.limits.max_class.rank:
        best = key.limits.max_class.value
        raise ClassNotAllowed(f"this key may not use {asked.value}", f"at best {best}", "service_class")
    return asked or key.slo


def _namespace(key: Key | None, salt: str | None, share_cache: bool) -> str | None:
    """The prefix cache's namespace: the key's own, divided further by the request's salt."""
    own = key.name if key and not share_cache else ""
    return f"{len(own)}:{own}{salt or ''}" if own or salt else None
