#!/usr/bin/env python3
"""Generates docs/api.md from the code: every route and field of each dialect, supported or refused.

python scripts/make_api_docs.py            writes the page
python scripts/make_api_docs.py --check    exits with 1 if the page is stale
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fastapi.routing import APIRoute
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

from kvasir.fields import FIELDS
from kvasir.serve.app import create_app
from kvasir.serve.hosting.catalogue import Catalogue
from kvasir.serve.http.wire import LEAVE_OUT, Wire
from kvasir.serve.meanings import meaning_of
from kvasir.serve.settings import ServeSettings
from scripts import api_examples

Objects = dict[str, type[Wire]]
PAGE = Path(__file__).parent.parent / "docs/api.md"
HEAD = """# API

All routes and fields, generated from the code by `python scripts/make_api_docs.py`. The examples are real exchanges
with the bundled model. [Dialects](dialects.md) describes the differences from the original servers.

- A field that is not listed is refused, unless the server was started with `--ignore-unknown-fields`.
- A *refused* field gets a 400 that names it, unless its value is null or one of those in brackets.
- A type in *italics* is an [object](#objects) with its own table.
- Errors have a status, a message that says what was wrong, and what to do. 429 and 503 come with `Retry-After`.
"""
TITLES = {
    "openai": "OpenAI",
    "anthropic": "Anthropic",
    "ollama": "Ollama",
    "llama.cpp": "llama.cpp",
    "adapters": "Adapters",
    "tokens": "Token routes of vLLM",
    "server": "The server",
    "fleet": "The fleet",
    "tgi": "Text Generation Inference",
    "sglang": "SGLang",
}
# Bases whose fields many routes have: the anchor of the section that lists them.
SHARED = {
    "Scheduling": ("scheduling and caching", "fields-of-scheduling-and-caching"),
    "Drafting": ("scheduling and caching", "fields-of-scheduling-and-caching"),
    "Trust": ("scheduling and caching", "fields-of-scheduling-and-caching"),
    "Structured": ("structured output", "fields-of-structured-output"),
}
SAMPLING = ("sampling", "fields-of-sampling")


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

    async def sleep(self, name, drain): ...
    async def wake_up(self, name): ...
    async def is_sleeping(self, name):
        return False

    async def means(self, name, *, loads=False):
        raise NotImplementedError

    def lease(self, name, keep_alive=None):
        raise NotImplementedError


def page() -> str:
    groups: dict[str, dict[object, list[APIRoute]]] = {}
    for route in _routes(create_app(_Nothing(ServeSettings())).routes):
        if route.include_in_schema:
            tag = str(route.tags[0]) if route.tags else "server"
            groups.setdefault(tag, {}).setdefault((route.endpoint, tuple(sorted(route.methods or ()))), []).append(
                route
            )
    examples, objects, shown = api_examples.run(), {}, {}
    parts = [HEAD]
    for tag in (*[t for t in TITLES if t in groups], *sorted(set(groups) - set(TITLES))):
        parts.append(f"## {TITLES.get(tag, tag)}\n")
        for same in groups[tag].values():
            parts += _route(same, objects, examples, shown)
    parts += _shared(objects)
    parts.append("## Objects\n")
    done: set[type[Wire]] = set()
    while left := [model for model in objects.values() if model not in done]:
        parts += [f"### {_title(left[0])}\n", *_table(left[0], objects)]
        done.add(left[0])
    return "\n".join(parts).rstrip() + "\n"


def _routes(routes: Iterable[object]) -> Iterator[APIRoute]:
    """All routes, including those of included routers, which newer FastAPI versions do not flatten."""
    for route in routes:
        if isinstance(route, APIRoute):
            yield route
        else:
            yield from _routes(getattr(getattr(route, "original_router", None), "routes", ()))


def _route(
    routes: list[APIRoute], objects: Objects, examples: Mapping[str, str], shown: dict[type[Wire], str]
) -> Iterator[str]:
    """shown: the route whose section has the table of a body."""
    route = routes[0]
    method = " ".join(sorted(route.methods or ()))
    title = f"{method} {route.path.replace(':path', '')}"
    yield f"### {title}\n"
    if len(routes) > 1:
        yield f"Also {', '.join(f'`{other.path}`' for other in routes[1:])}.\n"
    if text := _line(route.endpoint.__doc__):
        yield text + "\n"
    if example := examples.get(f"{method} {route.path}"):
        yield example
    parameters = (*route.dependant.query_params, *route.dependant.header_params)
    names = [name for p in parameters for name in getattr(p.field_info.annotation, "model_fields", (p.alias,))]
    if names:
        yield f"Query and headers: {', '.join(f'`{name}`' for name in names)}.\n"
    for body in route.dependant.body_params:
        for model in _models(body.field_info.annotation):
            if (first := shown.setdefault(model, title)) == title:
                yield from _table(model, objects)
            else:
                anchor = re.sub(r"[^\w\- ]", "", first.lower()).replace(" ", "-")
                yield f"Its fields are those of [{first}](#{anchor}).\n"


def _table(model: type[Wire], objects: Objects) -> Iterator[str]:
    """The fields of a model: its own with their meanings, and the names of those that other sections describe."""
    refused, ignored = getattr(model, "REFUSED", {}), getattr(model, "IGNORED", ())
    own, elsewhere = [], {}
    for name, field in sorted(model.model_fields.items(), key=lambda item: _rank(model, *item)):
        if name in refused or name in ignored:
            continue
        where = _section(model, name)
        if where:
            elsewhere.setdefault(where, []).append(_alias(name, field))
        else:
            own.append(_row(model, name, field, objects))
    if own:
        yield "\n".join(["| field | type | meaning |", "|---|---|---|", *own, ""])
    for (title, anchor), names in elsewhere.items():
        yield f"Fields of [{title}](#{anchor}): {', '.join(f'`{name}`' for name in names)}.\n"
    if refused:
        names = (_refused(_alias(name, model.model_fields[name]), *refused[name]) for name in refused)
        yield f"Refused: {', '.join(names)}.\n"
    if ignored:
        names = (_alias(name, model.model_fields[name]) for name in ignored)
        yield f"Accepted, without effect: {', '.join(f'`{name}`' for name in names)}.\n"


def _rank(model: type[Wire], name: str, field: FieldInfo) -> tuple[bool, bool, int]:
    """Required fields come first, then the model's name, then the model's own fields before inherited ones."""
    home = next(i for i, c in enumerate(model.__mro__) if name in inspect.get_annotations(c))
    return not field.is_required(), name != "model", home


def _section(model: type[Wire], name: str) -> tuple[str, str] | None:
    """The section that describes a field, if it is inherited from a base that many routes have."""
    home = next(c for c in model.__mro__ if name in inspect.get_annotations(c))
    if home is model:
        return None
    return SAMPLING if home.__name__.endswith("Sampling") and home.__bases__ == (Wire,) else SHARED.get(home.__name__)


def _refused(name: str, harmless: tuple[object, ...], hint: str) -> str:
    unless = f" (unless {' or '.join(f'`{json.dumps(h)}`' for h in harmless)})" if harmless else ""
    return f"`{name}`{unless}" + ("" if hint == LEAVE_OUT else f": {hint}")


def _alias(name: str, field: FieldInfo) -> str:
    if isinstance(field.validation_alias, AliasChoices):
        return "`, `".join(str(choice) for choice in field.validation_alias.choices)
    return field.alias or (field.validation_alias if isinstance(field.validation_alias, str) else name)


def _row(model: type[Wire], name: str, field: FieldInfo, objects: Objects) -> str:
    need = ", required" if field.is_required() else ""
    kind = _kind(field.annotation, objects) + (_bounds(field) or _range(name, field))
    return f"| `{_alias(name, field)}`{need} | {kind} | {_cell(meaning_of(model, name))} |"


def _bounds(field: FieldInfo) -> str:
    """The range of a number, and the greatest length of a list."""
    found: dict[str, object] = {}
    for item in (*field.metadata, *_inner_metadata(field.annotation)):
        for key in ("ge", "gt", "le", "lt", "max_length"):
            if (value := getattr(item, key, None)) is not None:
                found[key] = value
    low = found.get("ge", found.get("gt"))
    high = found.get("le", found.get("lt"))
    if high == 2**31 - 1:
        high = None
    text = f", {'above ' if 'gt' in found else ''}{low}" if low is not None else ""
    if high is not None:
        text += f" to {high}" if low is not None else f", at most {high}"
    elif low is not None:
        text = text.replace(", above", ", more than") if "gt" in found else f", at least {low}"
    return text + (f", at most {found['max_length']} long" if "max_length" in found else "")


def _range(name: str, field: FieldInfo) -> str:
    """The range of a number by the table of fields."""
    row = next((row for row in FIELDS if name in {row.name, *row.names.values()} and row.high > row.low), None)
    if row is None or {int, float}.isdisjoint(typing.get_args(field.annotation) or (field.annotation,)):
        return ""
    return f", at least {row.low:g}" if row.high == 2**31 - 1 else f", {row.low:g} to {row.high:g}"


def _inner_metadata(annotation: object) -> Iterator[object]:
    """What is annotated to the alternatives of a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _inner_metadata(argument)
    if typing.get_origin(annotation) is typing.Annotated:
        for item in typing.get_args(annotation)[1:]:
            yield from (item.metadata if isinstance(item, FieldInfo) else (item,))


def _shared(objects: Objects) -> Iterator[str]:
    """The sections of fields that many routes have."""
    from kvasir.serve.conversation.drafting import Drafting
    from kvasir.serve.conversation.trust import Trust
    from kvasir.serve.dialects.openai.structured import Structured

    yield "## Fields of scheduling and caching\n"
    yield "All routes that compute have them. [Scheduling](scheduling.md) explains them.\n"
    fields = {**Drafting.model_fields, **Trust.model_fields}
    rows = [_row(Drafting, name, field, objects) for name, field in fields.items()]
    yield "\n".join(["| field | type | meaning |", "|---|---|---|", *rows, ""])
    yield "## Fields of structured output\n\n[Structured output](structured-output.md) explains them.\n"
    rows = [_row(Structured, name, field, objects) for name, field in Structured.model_fields.items()]
    yield "\n".join(["| field | type | meaning |", "|---|---|---|", *rows, ""])
    yield "## Fields of sampling\n\n[Sampling](sampling.md#the-fields) lists them with defaults, bounds and names.\n"


def _title(model: type[Wire]) -> str:
    """A name for an object. Classes of different dialects may have the same."""
    dialect = model.__module__.split(".dialects.")[-1].split(".")[0] if ".dialects." in model.__module__ else ""
    return (
        f"{model.__name__} of {TITLES.get(dialect, dialect)}" if dialect in ("ollama", "anthropic") else model.__name__
    )


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")


def _kind(annotation: object, objects: Objects) -> str:
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
        objects.setdefault(_title(annotation), annotation)
        return f"*[{annotation.__name__}](#{_title(annotation).lower().replace(' ', '-')})*"
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
