"""Strings that record the origin of each of their characters. Imported by the template worker: standard library only.

`Marked` is a `str` with one byte per character: `TEMPLATE`, `OUTSIDE` or `MODEL`. Each operation returns the same text
as `str`. The marks are exact wherever a character of the result is a character of an operand; if that does not hold for
the whole result, all of it counts as outside. A plain `str` belongs to the template.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from string import Formatter
from typing import Any, Self, SupportsIndex

TEMPLATE, OUTSIDE, MODEL = 0, 1, 2  # MODEL: outside too, but declared as a model's own output

_PRINTF = re.compile(r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[#0\- +]*\d*(?:\.\d+)?)[hlL]?(?P<kind>[a-zA-Z%])")


class Marked(str):
    """Immutable. `_marks`: one byte per character."""

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, text: str, marks: bytes) -> Self:
        self = str.__new__(cls, text)
        self._marks = marks
        return self

    # -- pieces and sums -----------------------------------------------------------------------------------

    def __str__(self) -> Marked:
        return self

    def __getitem__(self, index: SupportsIndex | slice) -> Self:
        text = str.__getitem__(self, index)
        marks = self._marks[index]
        return self._with(text, marks if isinstance(marks, bytes) else bytes((marks,)))

    def __iter__(self) -> Iterator[Self]:
        marks = self._marks
        return (self._with(c, marks[i : i + 1]) for i, c in enumerate(str.__iter__(self)))

    def __add__(self, other: object) -> Self:
        if not isinstance(other, str):
            return NotImplemented
        return self._with(str.__add__(self, other), self._marks + marks_of(other))

    def __radd__(self, other: object) -> Self:
        if not isinstance(other, str):
            return NotImplemented
        return self._with(str.__add__(other, self), marks_of(other) + self._marks)

    def __mul__(self, count: SupportsIndex) -> Self:
        return self._with(str.__mul__(self, count), self._marks * count)

    __rmul__ = __mul__  # type: ignore[assignment]

    def join(self, pieces: Iterable[str]) -> Self:
        pieces = list(pieces)
        return self._with(str.join(self, pieces), self._marks.join(map(marks_of, pieces)))

    def _with(self, text: str, marks: bytes) -> Self:
        return type(self)(text, marks)

    def _with_lost(self, text: str, *operands: object) -> Self:
        return self._with(text, marks_of(lost(text, *operands)))

    def _cut(self, start: int, text: str) -> Self:
        """`text`, which is the part of this string that begins at `start`."""
        return self._with(text, self._marks[start : start + len(text)])

    # -- ends ----------------------------------------------------------------------------------------------

    def lstrip(self, chars: str | None = None) -> Self:
        text = str.lstrip(self, chars)
        return self._cut(len(self) - len(text), text)

    def rstrip(self, chars: str | None = None) -> Self:
        return self._cut(0, str.rstrip(self, chars))

    def strip(self, chars: str | None = None) -> Self:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Self:
        text = str.removeprefix(self, prefix)
        return self._cut(len(self) - len(text), text)

    def removesuffix(self, suffix: str) -> Self:
        return self._cut(0, str.removesuffix(self, suffix))

    def ljust(self, width: SupportsIndex, fillchar: str = " ") -> Self:
        fill = max(0, width.__index__() - len(self))
        return self._with(str.ljust(self, width, fillchar), self._marks + marks_of(fillchar) * fill)

    def rjust(self, width: SupportsIndex, fillchar: str = " ") -> Self:
        fill = max(0, width.__index__() - len(self))
        return self._with(str.rjust(self, width, fillchar), marks_of(fillchar) * fill + self._marks)

    # -- parts ---------------------------------------------------------------------------------------------

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Self]:  # type: ignore[override]
        return self._parts(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Self]:  # type: ignore[override]
        return self._parts(str.rsplit(self, sep, maxsplit), sep)

    def _parts(self, parts: list[str], sep: str | None) -> list[Self]:
        """The parts with `sep` between them. None: separated by white space, with which no part begins."""
        result, start = [], 0
        for part in parts:
            start = str.find(self, part, start) if sep is None else start
            result.append(self._cut(start, part))
            start += len(part) + len(sep or "")
        return result

    def splitlines(self, keepends: bool = False) -> list[Self]:  # type: ignore[override]
        result, start = [], 0
        for whole, line in zip(str.splitlines(self, True), str.splitlines(self, keepends), strict=True):
            result.append(self._cut(start, line))
            start += len(whole)
        return result

    def partition(self, sep: str) -> tuple[Self, Self, Self]:
        return self._in_three(str.partition(self, sep))

    def rpartition(self, sep: str) -> tuple[Self, Self, Self]:
        return self._in_three(str.rpartition(self, sep))

    def _in_three(self, parts: tuple[str, str, str]) -> tuple[Self, Self, Self]:
        first, second, third = parts
        return self._cut(0, first), self._cut(len(first), second), self._cut(len(first) + len(second), third)

    # -- other texts ---------------------------------------------------------------------------------------

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> Self:
        if not old:
            return self._with_lost(str.replace(self, old, new, count), self, new)
        return self._with(new, marks_of(new)).join(self.split(old, count))

    def upper(self) -> Self:
        return self._letters(str.upper(self))

    def lower(self) -> Self:
        return self._letters(str.lower(self))

    def title(self) -> Self:
        return self._letters(str.title(self))

    def capitalize(self) -> Self:
        return self._letters(str.capitalize(self))

    def swapcase(self) -> Self:
        return self._letters(str.swapcase(self))

    def casefold(self) -> Self:
        return self._letters(str.casefold(self))

    def _letters(self, text: str) -> Self:
        """The text after a change of case. No letter becomes empty, so with equal lengths the characters correspond one
        to one."""
        return self._with(text, self._marks) if len(text) == len(self) else self._with_lost(text, self)

    def __mod__(self, values: Any) -> Marked:
        return printf(self, values)

    def __rmod__(self, form: str) -> Marked:
        return printf(form, self)


def marks_of(text: str) -> bytes:
    return text._marks if isinstance(text, Marked) else bytes(len(text))


def marked(text: str) -> Marked:
    """The same string if it is marked; a plain string becomes the template's own."""
    return text if isinstance(text, Marked) else Marked(text, bytes(len(text)))


def outside(text: str, mark: int = OUTSIDE) -> Marked:
    return Marked(text, bytes((mark,)) * len(text))


def from_outside(value: Any, mark: int = OUTSIDE) -> Any:
    """A JSON-like value with all its strings marked, including keys."""
    if isinstance(value, str):
        return outside(value, mark)
    if isinstance(value, list):
        return [from_outside(item, mark) for item in value]
    if isinstance(value, dict):
        return {_name(key, mark): from_outside(item, mark) for key, item in value.items()}
    return value


@lru_cache(1024)
def _name(key: str, mark: int) -> Marked:
    """A marked key, cached: the same few keys occur in every message."""
    return outside(key, mark)


def is_own(value: object) -> bool:
    """Whether no part of the value can come from outside. Numbers count as the template's, since digits carry no
    marks."""
    if isinstance(value, Marked):
        return not any(value._marks)
    return value is None or type(value) in (str, int, float, bool)


def lost(result: Any, *operands: object) -> Any:
    """The result of an operation that keeps no marks: its strings are outside unless all operands are the
    template's."""
    if all(map(is_own, operands)):
        return result
    if isinstance(result, str):
        return result if isinstance(result, Marked) else outside(str(result))
    if isinstance(result, list | tuple):
        return type(result)([lost(item, *operands) for item in result])
    if isinstance(result, dict):
        return {lost(key, *operands): lost(item, *operands) for key, item in result.items()}
    return result


def text_of(value: object) -> str:
    """The text that a template prints for a value. A list or an object is printed as by Python, which keeps no
    marks."""
    if type(value) is Marked or type(value) is str:
        return value
    if isinstance(value, str):
        return str(value)
    return str(value) if is_own(value) else outside(str(value))


def join(pieces: Iterable[Any]) -> Marked:
    return _NOTHING.join(map(text_of, pieces))


_NOTHING = Marked("", b"")


# -- forms with fields ---------------------------------------------------------------------------------------


def printf(form: str, values: Any) -> Marked:
    """`form % values`"""
    return _assembled(str.__mod__(form, values), form, lambda: _printf_pieces(form, values))


def format_fields(formatter: Formatter, form: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Marked:
    """`form.format(*args, **kwargs)`"""
    text = formatter.vformat(form, args, kwargs)
    return _assembled(text, form, lambda: _format_pieces(formatter, form, args, kwargs))


def _assembled(text: str, form: str, pieces: Callable[[], Iterable[str]]) -> Marked:
    """`text` with the marks of the pieces that form it; all of it is outside if the pieces do not form it."""
    try:
        made = join(pieces()) if is_own(form) else None
    except (LookupError, TypeError, ValueError):
        made = None
    return made if made is not None and made == text else outside(text)


def _printf_pieces(form: str, values: Any) -> Iterator[str]:
    rest, start = iter(values if isinstance(values, tuple) else (values,)), 0
    for field in _PRINTF.finditer(form):
        yield form[start : field.start()]
        start = field.end()
        key, flags, kind = field["key"], field["flags"], field["kind"]
        if kind == "%":
            yield "%"
            continue
        value = next(rest, None) if key is None else dict(values)[key]
        yield _piece(value, kind == "s" and not flags, str.__mod__(f"%{flags}{kind}", (value,)))
    yield form[start:]


def _format_pieces(formatter: Formatter, form: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    count = 0
    for literal, name, spec, conversion in formatter.parse(form):
        yield literal
        if name is None:
            continue
        if not name:
            name, count = str(count), count + 1
        value = formatter.get_field(name, args, kwargs)[0]
        made = formatter.format_field(formatter.convert_field(value, conversion), spec or "")
        yield _piece(value, not spec and conversion in (None, "s"), made)


def _piece(value: object, whole: bool, made: str) -> str:
    """The text of a formatted field: the value itself if it is printed `whole`."""
    return value if whole and isinstance(value, Marked) else lost(str(made), value)
