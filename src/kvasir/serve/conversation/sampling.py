"""Sampling parameters of a request: its own, then those that its model recommends, then the defaults.

The fields of each dialect, their wire types and their conversion come from the table in `kvasir.fields`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, create_model

from kvasir.errors import InvalidRequest
from kvasir.fields import FIELDS, FieldKind, FieldRow, fields_of
from kvasir.serve.http.wire import TextOrList, TokenIds, Wire
from kvasir.types import ModelInfo, SamplingParams

NOTHING: Mapping[str, Any] = MappingProxyType({})
_RECOMMENDED = {row.name for row in FIELDS if row.recommended}
_TYPES: dict[FieldKind, Any] = {
    FieldKind.NUMBER: float,
    FieldKind.INTEGER: int,
    FieldKind.CHOICE: int,
    FieldKind.FLAG: bool,
    FieldKind.IDS: TokenIds,
}
# Mirostat replaces these filters: their recommended and default values are dropped, values in the request are not.
_REPLACED = ("top_p", "top_k", "min_p")


def wire_of(dialect: str, integer: Any = int) -> type[Wire]:
    """A base for the dialect's bodies: every field that it has, under its name there. SamplingParams checks the ranges.
    integer: the type of integers."""
    types = _TYPES | {FieldKind.INTEGER: integer, FieldKind.CHOICE: integer}
    fields: dict[str, Any] = {theirs: (_type(row, types) | None, None) for theirs, row in fields_of(dialect).items()}
    return create_model(f"{dialect.capitalize()}Sampling", __base__=Wire, __module__=__name__, **fields)


def _type(row: FieldRow, types: Mapping[FieldKind, Any]) -> Any:
    if row.kind is FieldKind.TEXTS:
        return TextOrList if row.alone else Annotated[list[str], Field(max_length=row.most)]
    if row.kind is FieldKind.BIAS:
        return Annotated[dict[str, float], Field(max_length=row.most)]
    return types[row.kind]


def asked_fields(wire: Wire, dialect: str) -> dict[str, Any]:
    """The fields that a body of the dialect sets, under the names of SamplingParams. Raises InvalidRequest for a bias
    without a token id."""
    given = ((row, getattr(wire, theirs)) for theirs, row in fields_of(dialect).items())
    return {
        row.name: to_bias(value) if row.kind is FieldKind.BIAS else value for row, value in given if value is not None
    }


def described(params: Any, dialect: str) -> dict[str, Any]:
    """The values of SamplingParams under the dialect's names."""
    return {theirs: getattr(params, row.name) for theirs, row in fields_of(dialect).items()}


def sampling_params(
    asked: Mapping[str, Any], info: ModelInfo, own: Mapping[str, Any] = NOTHING, **given: Any
) -> SamplingParams:
    """asked: fields of SamplingParams that the request gives. own: those of the model's store entry. given: fields that
    the request always has; None yields to the store entry's value. Raises InvalidRequest."""
    fields = recommended(info, bool(asked.get("mirostat") or own.get("mirostat"))) | dict(own)
    if "presence_penalty" in asked or "frequency_penalty" in asked:
        fields.pop("occurrence_last_n", None)  # they count generated tokens only
    given = {k: v for k, v in given.items() if v is not None or k not in own}
    return SamplingParams(**(fields | dict(asked) | given))


def recommended(info: ModelInfo, mirostat: bool, defaults: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """What holds where a request sets nothing: the dialect's defaults, and over them the values of the model's
    generation_config.json."""
    fields = {**defaults, **{name: value for name, value in info.default_sampling.items() if name in _RECOMMENDED}}
    return {name: value for name, value in fields.items() if not (mirostat and name in _REPLACED)}


def to_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Token ids -> bias. JSON has only string keys. Raises InvalidRequest for a key that is not a token id."""
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidRequest(f"logit_bias names {key[:40]!r}", "expected token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
