"""docs/api.md says what the code does: it is made from it, and a field that counts as honoured is read somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from kvasir.fields import FIELDS, fields_of
from kvasir.serve.http.wire import Wire
from kvasir.serve.meanings import MEANINGS
from scripts import make_api_docs

ROOT = Path(__file__).parent.parent.parent


def wires(kind: type[Wire] = Wire) -> list[type[Wire]]:
    found = [w for sub in kind.__subclasses__() for w in (sub, *wires(sub))]
    return [wire for wire in found if wire.__module__.startswith("kvasir.")]


@cache
def words() -> frozenset[str]:
    """All that the server's code reads by name: attributes, and texts that are names."""
    code = "\n".join(path.read_text() for path in (ROOT / "src/kvasir/serve").rglob("*.py"))
    names = {*re.findall(r"\.([a-zA-Z_]\w*)", code), *re.findall(r"[\"']([a-zA-Z_]\w*)[\"']", code)}
    return frozenset(names.union(*map(fields_of, {dialect for row in FIELDS for dialect in row.names})))


def test_the_api_page_is_up_to_date():
    assert make_api_docs.PAGE.read_text() == make_api_docs.page(), "run python scripts/make_api_docs.py"


def test_every_field_is_read_refused_or_ignored():
    make_api_docs.page()  # imports all dialects
    found = wires()
    assert len(found) > 10
    for wire in found:
        for name in {*wire.REFUSED, *wire.IGNORED}:
            assert name in wire.model_fields, f"{wire.__name__}.{name} is no field"
        for name in wire.model_fields:
            if name not in wire.REFUSED and name not in wire.IGNORED:
                assert name in words(), f"{wire.__name__}.{name} is read nowhere"


def test_every_field_has_a_meaning():
    make_api_docs.page()  # imports all dialects
    for wire in wires():
        for name in wire.model_fields:
            if name not in wire.REFUSED and name not in wire.IGNORED:
                assert make_api_docs.meaning_of(wire, name), f"{wire.__name__}.{name}: add it to kvasir.serve.meanings"


def test_every_meaning_is_of_a_field():
    make_api_docs.page()
    fields = {(base.__name__, name) for wire in wires() for base in wire.__mro__ for name in wire.model_fields}
    for key in MEANINGS:
        owner, _, name = key.rpartition(".")
        assert (owner, name) in fields if owner else any(name == found for _, found in fields), key


def test_an_unread_field_is_detected():
    assert "a_name_that_nobody_reads" not in words()
