#!/usr/bin/env python3
"""Generates docs/api.md from the code: every route and field of each dialect, supported or refused.

python scripts/make_api_docs.py            writes the page
python scripts/make_api_docs.py --check    exits with 1 if the page is stale
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

All routes and fields, generated from the code by `python scripts/make_api_docs.py`. A field that is not listed is
refused as unknown. A *refused* field is a 400 that names it, unless its value is null or one of the values given after
"unless". An *ignored* field is accepted and has no effect. A type in *italics* is an object with its own table.
[Dialects](dialects.md) describes the differences from the original servers.
"""
TITLES = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "ollama": "Ollama",
    "llama.cpp": "llama.cpp",
    "adapters": "Adapters",
    "tokens": "Token routes of vLLM",
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

    async def card(self, name):
        raise NotImplementedError

    async def means(self, name, *, loads=False):
        raise NotImplementedError

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
    """All routes, including those of included routers, which newer FastAPI versions do not flatten."""
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
        what = "supported"
        if name in refused:
            harmless, hint = refused[name]
            unless = f" unless {' or '.join(f'`{h!r}`' for h in harmless)}" if harmless else ""
            what = f"refused{unless}: {hint}"
        elif name in ignored:
            what = "ignored"
        alias = field.alias or (field.validation_alias if isinstance(field.validation_alias, str) else name)
        if isinstance(field.validation_alias, AliasChoices):
            alias = " / ".join(str(choice) for choice in field.validation_alias.choices)
        need = ", required" if field.is_required() else ""
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
        print(f"{PAGE} is {'up to date' if same else f'stale; run python {__file__}'}")
        return 0 if same else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}: {text.count(chr(10) + '### ')} routes and objects")
    return 0


if __name__ == "__main__":
    sys.exit(main())
