"""The result of Jinja2's `safe` on a marked string. Imported by the template worker.

As with Jinja2's own `Markup`, any text added to it is escaped. Published templates trigger this, if hardly on purpose,
and models are used with the resulting prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import markupsafe

from kvasir.text.marked_string import Marked, lost, marks_of


class Html(Marked):
    """A text whose HTML characters need no escaping."""

    __slots__ = ()

    def __html__(self) -> Html:
        return self

    def __str__(self) -> Marked:
        return Marked(str.__str__(self), self._marks)

    def __add__(self, other: object) -> Html:
        return super().__add__(escape(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> Html:
        return super().__radd__(escape(other)) if isinstance(other, str) else NotImplemented

    def join(self, pieces: Iterable[Any]) -> Html:
        return super().join(map(escape, pieces))

    def replace(self, old: str, new: str, count: Any = -1) -> Html:
        return super().replace(old, escape(new), count)

    def __mod__(self, values: Any) -> Html:
        return html(markupsafe.Markup(str.__str__(self)) % values, self, values)


def escape(value: object) -> Html:
    """The text of a value with `&`, `<`, `>` and quotes escaped for HTML."""
    if isinstance(value, Html):
        return value
    escaped = str.__str__(markupsafe.escape(value))
    if not isinstance(value, str):
        return html(escaped, value)
    plain, marks = str.__str__(value), marks_of(value)
    if len(escaped) == len(plain):
        return Html(escaped, marks)
    sizes = (len(markupsafe.escape(c)) for c in plain)
    return Html(escaped, b"".join([marks[i : i + 1] * size for i, size in enumerate(sizes)]))


def html(text: str, *operands: object) -> Html:
    """HTML that an operation made from the operands."""
    plain = str.__str__(text)
    return Html(plain, marks_of(lost(plain, *operands)))
