"""Jinja2's filters on marked strings, for the features that templates use: the same texts, with exact marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import filters
from jinja2.exceptions import FilterArgumentError
from jinja2.utils import pass_environment

from kvasir.text.marked_html import Html, escape
from kvasir.text.marked_string import Marked, marked, marks_of, outside, text_of


def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> Marked:
    """JSON with keys in their order and without HTML escapes. Text inside a string's quotes has the string's marks;
    everything else is the template's."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    marks, end = [], 0
    for string in _strings(value, sort_keys):
        body = json.dumps(string, ensure_ascii=ensure_ascii)[1:-1]
        start = text.find(f'"{body}"', end) + 1
        if not start:  # a subclass of a JSON type with its own notation
            return outside(text)
        marks += (bytes(start - end), _body_marks(string, body, ensure_ascii))
        end = start + len(body)
    return Marked(text, b"".join((*marks, bytes(len(text) - end))))


def _strings(value: Any, sort_keys: bool) -> Iterator[str]:
    """The strings of a value in the order in which they are written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, sort_keys)
    elif isinstance(value, dict):
        for key, item in sorted(value.items()) if sort_keys else value.items():
            yield key if isinstance(key, str) else json.dumps(key)
            yield from _strings(item, sort_keys)


def _body_marks(string: str, body: str, ensure_ascii: bool) -> bytes:
    marks = marks_of(string)
    if len(body) == len(marks):
        return marks
    if len(set(marks)) == 1:
        return marks[:1] * len(body)
    sizes = (len(json.dumps(str(c), ensure_ascii=ensure_ascii)) - 2 for c in string)
    return b"".join([marks[i : i + 1] * size for i, size in enumerate(sizes)])


def plain(value: object) -> Marked:
    """Jinja2's `str`"""
    return marked(text_of(value))


def string(value: object) -> Marked:
    """Jinja2's `soft_str`, which keeps HTML as HTML."""
    return marked(value) if isinstance(value, str) else plain(value)


def safe(value: object) -> Html:
    return value if isinstance(value, Html) else Html(given := plain(value), marks_of(given))


def title(value: object) -> Marked:
    given = string(value)
    return given._letters(filters.do_title(str.__str__(given)))


@pass_environment
def join_filter(environment: Any, value: Any, d: object = "", attribute: str | int | None = None) -> Marked:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return plain(d).join(map(text_of, value))


def replace(value: object, old: object, new: object, count: int | None = None) -> Marked:
    return plain(value).replace(text_of(old), text_of(new), -1 if count is None else count)


def indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Marked:
    kind = safe if isinstance(value, Html) else plain
    by, newline = kind(width if isinstance(width, str) else " " * width), kind("\n")
    lines = (marked(value) + newline).splitlines()
    rest = [by + line if line or blank else line for line in lines[1:]]
    return newline.join([by + lines[0] if first else lines[0], *rest])


def form(value: object, *args: Any, **kwargs: Any) -> Marked:
    if args and kwargs:
        raise FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return string(value) % (kwargs or args)


FILTERS: dict[str, Callable[..., Any]] = {
    "capitalize": lambda value: string(value).capitalize(),
    "e": escape,
    "escape": escape,
    "forceescape": lambda value: escape(plain(value)),
    "format": form,
    "indent": indent,
    "join": join_filter,
    "lower": lambda value: string(value).lower(),
    "replace": replace,
    "safe": safe,
    "string": string,
    "title": title,
    "tojson": tojson,
    "trim": lambda value, chars=None: string(value).strip(chars),
    "upper": lambda value: string(value).upper(),
}
