"""The table of request fields: what is derived from it is current, and what it says holds."""

from __future__ import annotations

import dataclasses

import pytest

from kvasir.errors import ConfigError, InvalidRequest
from kvasir.fields import FIELDS, NATIVE, SAMPLER, FieldKind, FieldRow
from kvasir.ops import native
from kvasir.plan import SamplingSpec
from kvasir.types import SamplingParams
from kvasir.validate import _CHECKED
from scripts import make_fields


def ranged(rows: tuple[FieldRow, ...] = FIELDS) -> list[FieldRow]:
    return [row for row in rows if row.kind in (FieldKind.NUMBER, FieldKind.INTEGER)]


def test_generated_files_are_up_to_date():
    for path, text in make_fields.made().items():
        assert path.read_text() == text, "run python scripts/make_fields.py"


def test_the_table_has_all_fields_of_requests_and_plans():
    names = [row.name for row in FIELDS]
    assert [f.name for f in dataclasses.fields(SamplingParams)] == [*names, "structured_outputs"]
    assert [f.name for f in dataclasses.fields(SamplingSpec)][: len(SAMPLER)] == [row.name for row in SAMPLER]
    assert {row.name for row in NATIVE} | {r.name for r in SAMPLER if r.name.startswith("dry_")} == {
        row.name for row in SAMPLER
    }


def test_defaults_are_in_range():
    """They are not checked with each request."""
    for name, default, row, check in _CHECKED:
        check(row, default)
        assert getattr(SamplingParams(), name) == default


@pytest.mark.parametrize("row", ranged(), ids=lambda row: row.name)
def test_a_range_holds_to_its_ends(row):
    room = {"max_tokens": None} if row.name == "min_tokens" else {}
    for value in [row.high] if row.open_low else [row.low, row.high]:
        assert getattr(SamplingParams(**{row.name: value} | room), row.name) == value
    step = 1 if row.kind is FieldKind.INTEGER else 1e-6
    for value in [row.low - (0 if row.open_low else step), row.high + step, True, "1", float("nan")]:
        with pytest.raises(InvalidRequest) as error:
            SamplingParams(**{row.name: value} | room)
        assert error.value.param == row.name and "expected a" in str(error.value)


@pytest.mark.parametrize("row", [row for row in SAMPLER if row.sampler], ids=lambda row: row.name)
def test_the_value_that_disables_a_sampler_is_valid(row):
    assert getattr(SamplingParams(**{row.name: row.off}), row.name) == row.off


@pytest.mark.parametrize("row", [row for row in SAMPLER if row.carries], ids=lambda row: row.name)
def test_a_sampler_spec_states_whether_it_has_a_carry(row):
    other = next(iter(set(row.choices) - {row.off})) if row.choices else row.high
    spec = SamplingSpec(**{row.name: other})
    assert spec.carries and not dataclasses.replace(spec, **{row.name: row.off}).carries
    assert not SamplingSpec().carries


@pytest.mark.skipif(not native.available(), reason=native.reason())
def test_a_library_of_other_members_is_refused(monkeypatch):
    native.load(native.PATH)
    monkeypatch.setattr(native, "LAYOUT", native.LAYOUT ^ 1)
    with pytest.raises(ConfigError, match="other sampling fields"):
        native.load(native.PATH)
