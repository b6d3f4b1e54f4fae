#!/usr/bin/env python3
"""Writes docs/api.md: every route and field of each dialect, honoured or refused, from the code itself.

python scripts/make_api_docs.py            writes it
python scripts/make_api_docs.py --check    exits 1 where it is not as it would be written
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastapi.routing import APIRoute
from pydantic import AliasChoices

from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import Catalogue
from kvasir.serve.http.wire import Wire
from kvasir.serve.settings import ServeSettings

PAGE = Path(__file__).parent.parent / "docs/api.md"
HEAD = """# API

Every route and field there is, made from the code by `python scripts/make_api_docs.py`. A field that is not here is
refused as unknown. *Refused* is a 400 that names the field, unless it has one of the values behind "but for" (null
always is one); *no meaning here* is accepted, since it asks for nothing that this server does. A type in *italics* is
an object with a table of its own. What differs from the originals is in [dialects](dialects.md).
"""
TITLES = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "ollama": "Ollama",
    "llama.cpp": "llama.cpp",
    "tokens": "Tokens, as vLLM has them",
    "server": "The server",
}


class _Nothing(Catalogue):
    """A catalogue for an application that serves no request."""

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    def cards(self):
        return ()

    def loaded(self):
        return ()

    def lease(self, name, keep_alive=None):
        raise NotImplementedError


def page() -> str:
    routes = list(_routes(create_app(_Nothing(ServeSettings())).routes))
    groups: dict[str, list[APIRoute]] = {}
    for route in routes:
        if route.include_in_schema:
            groups.setdefault(str(route.tags[0]) if route.tags else "server", []).append(route)
    order = [*TITLES, *sorted(set(groups) - set(TITLES))]
    parts = [HEAD]
    for tag in (t for t in order if t in groups):
        parts.append(f"## {TITLES.get(tag, tag)}\n")
        objects: dict[str, type[Wire]] = {}
        for route in groups[tag]:
            parts += _route(route, objects)
        done: set[str] = set()
        while left := [name for name in objects if name not in done]:
            parts += [f"### Object {left[0]}\n", *_table(objects[left[0]], objects)]
            done.add(left[0])
    return "\n".join(parts).rstrip() + "\n"


def _routes(routes: Iterable[object]) -> Iterator[APIRoute]:
    """Those of included routers too, which newer FastAPI keeps as they are."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from _routes(getattr(getattr(route, "original_router", None), "routes", ()))


def _route(route: APIRoute, objects: dict[str, type[Wire]]) -> Iterator[str]:
    yield f"### {' '.join(sorted(route.methods))} {route.path}\n"
    if text := _line(route.endpoint.__doc__):
        yield text + "\n"
    parameters = (*route.dependant.query_params, *route.dependant.header_params)
    names = [name for p in parameters for name in getattr(p.field_info.annotation, "model_fields", (p.alias,))]
    if names:
        yield f"Query and headers: {', '.join(f'`{name}`' for name in names)}.\n"
    for body in route.dependant.body_params:
        kind = body.field_info.annotation
        for model in _models(kind):
            yield from _table(model, objects)


def _table(model: type[Wire], objects: dict[str, type[Wire]]) -> Iterator[str]:
    yield "| field | type | |\n|---|---|---|"
    refused, ignored = getattr(model, "REFUSED", {}), getattr(model, "IGNORED", ())
    for name, field in model.model_fields.items():
        what = "honoured"
        if name in refused:
            harmless, hint = refused[name]
            but = f", but for {', '.join(f'`{h!r}`' for h in harmless)}" if harmless else ""
            what = f"refused{but}: {hint}"
        elif name in ignored:
            what = "no meaning here"
        alias = field.alias or (field.validation_alias if isinstance(field.validation_alias, str) else name)
        if isinstance(field.validation_alias, AliasChoices):
            alias = " / ".join(str(choice) for choice in field.validation_alias.choices)
        need = ", needed" if field.is_required() else ""
        kind = "" if name in refused else _kind(field.annotation, objects)
        yield f"| `{alias}`{need} | {kind} | {what.replace('|', chr(92) + '|')} |"
    yield ""


def _kind(annotation: object, objects: dict[str, type[Wire]]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _kind(arguments[0], objects)
    if origin in (typing.Union, types.UnionType):
        kinds = [_kind(a, objects) for a in arguments if a is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if origin is typing.Literal:
        return " ".join(f"`{value}`" for value in arguments)
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0], objects)}" if arguments else "list"
    if isinstance(annotation, type) and issubclass(annotation, Wire):
        objects.setdefault(annotation.__name__, annotation)
        return f"*{annotation.__name__}*"
    names = {str: "text", int: "integer", float: "number", bool: "boolean", dict: "object", typing.Any: "any"}
    return names.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))  # type: ignore[arg-type]


def _models(annotation: object) -> list[type[Wire]]:
    if isinstance(annotation, type) and issubclass(annotation, Wire):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]


def _line(doc: str | None) -> str:
    """The first paragraph of a docstring, in one line."""
    return re.sub(r"\s+", " ", (doc or "").strip().split("\n\n")[0])


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text() == text
        print(f"{PAGE} is {'as' if same else 'not as'} the code says" + ("" if same else f"; run python {__file__}"))
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}: {text.count(chr(10) + '### ')} routes and objects")
    return 0


if __name__ == "__main__":
    sys.exit(main())
