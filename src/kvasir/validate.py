"""Range checks of sampling parameters, made before any work; errors name the field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvasir.errors import InvalidRequest, quoted
from kvasir.fields import FIELDS, FieldKind, FieldRow, RequestFields


def _number(row: FieldRow, value: Any) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if not ok or not row.low <= value <= row.high or (row.open_low and value == row.low):
        bracket = "(" if row.open_low else "["
        expected = f"expected a number in {bracket}{row.low}, {row.high}]"
        raise InvalidRequest(f"{row.name} is {quoted(value)}", expected, param=row.name)


def _integer(row: FieldRow, value: Any) -> None:
    if value is None and row.optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not row.low <= value <= row.high:
        expected = f"expected an integer in [{row.low}, {row.high}]"
        raise InvalidRequest(f"{row.name} is {quoted(value)}", expected, param=row.name)


def _choice(row: FieldRow, value: Any) -> None:
    if type(value) is not int or value not in row.choices:
        expected = " or ".join(f"{known} ({meaning})" for known, meaning in row.choices.items())
        raise InvalidRequest(f"{row.name} is {quoted(value)}", f"expected {expected}", param=row.name)


def _texts(row: FieldRow, texts: Any) -> None:
    if len(texts) > row.most:
        raise InvalidRequest(f"{row.name} has {len(texts)} strings", f"at most {row.most}", param=row.name)
    if any(not isinstance(s, str) or not s or len(s) > row.chars for s in texts):
        raise InvalidRequest(f"{row.name} has one that is empty, too long or no string",
                             f"expected 1 to {row.chars} characters", param=row.name)  # fmt: skip


def _ids(row: FieldRow, ids: Any) -> None:
    for t in ids:
        if not isinstance(t, int) or isinstance(t, bool) or not 0 <= t < 2**31:
            raise InvalidRequest(f"{row.name} holds {quoted(t)}", "expected token ids", param=row.name)


def _bias(row: FieldRow, biases: Any) -> None:
    if len(biases) > row.most:
        raise InvalidRequest(f"{len(biases)} {row.name} entries", f"at most {row.most}", param=row.name)
    for token, bias in biases.items():
        if not isinstance(token, int) or not 0 <= token < 2**31:
            raise InvalidRequest(f"{row.name} names token {quoted(token)}", "expected token ids", param=row.name)
        if not isinstance(bias, int | float) or not row.low <= bias <= row.high:
            message = f"{row.name} of token {token} is {quoted(bias)}"
            raise InvalidRequest(message, f"expected [{row.low}, {row.high}]", param=row.name)


_CHECKS: dict[FieldKind, Callable[[FieldRow, Any], None]] = {
    FieldKind.NUMBER: _number,
    FieldKind.INTEGER: _integer,
    FieldKind.CHOICE: _choice,
    FieldKind.TEXTS: _texts,
    FieldKind.IDS: _ids,
    FieldKind.BIAS: _bias,
}
_CHECKED = tuple((row.name, row.default, row, _CHECKS[row.kind]) for row in FIELDS if row.kind in _CHECKS)


def check_sampling(p: RequestFields, structured: object | None = None) -> None:
    """Raises InvalidRequest, with `param` set, for the first field that is out of range. structured: the requested
    structure."""
    for name, default, row, check in _CHECKED:
        if (value := getattr(p, name)) is not default:
            check(row, value)
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise InvalidRequest(f"min_tokens {p.min_tokens} is larger than max_tokens {p.max_tokens}", param="min_tokens")
    if structured is not None:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(p, name):
                message = f"{name} cannot be combined with structured_outputs, which decide where the choice ends"
                raise InvalidRequest(message, "leave it out", param=name)


def check_structured(wanted: object) -> None:
    """wanted: types.StructuredOutputs. Raises InvalidRequest unless exactly one kind is given."""
    kinds = ("json", "json_object", "regex", "choice", "grammar", "tags")
    given = [name for name in kinds if getattr(wanted, name) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest(
            f"{len(given)} kinds of structured output are given",
            f"expected exactly one of {', '.join(kinds)}", param="structured_outputs",
        )  # fmt: skip
