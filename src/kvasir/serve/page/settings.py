"""GET /page/fields.js: the numbers of the page's settings, with the ranges and descriptions of `kvasir.fields`."""

from __future__ import annotations

import json
from typing import Any

from kvasir.fields import FIELDS, FieldKind, FieldRow

SHOWN = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("max_tokens", "seed"),
)
SAFE = 2**53 - 1  # the largest integer that JavaScript represents exactly, as are all below it
STEP = 1e-6  # from the end of a range that does not include it


def module() -> bytes:
    """A script that exports FIELDS, the attributes of an input for each field."""
    rows = {row.name: row for row in FIELDS}
    return f"export const FIELDS = {json.dumps([_input(rows[name]) for name in SHOWN])};\n".encode()


def _input(row: FieldRow) -> dict[str, Any]:
    hint = row.flag or f"{row.doc[0].upper()}{row.doc[1:]}."
    return {
        "name": row.name,
        "label": row.name.replace("_", " ").capitalize(),
        "hint": hint,
        "min": max(row.low, -SAFE) + (STEP if row.open_low else 0),
        "max": min(row.high, SAFE),
        "step": 1 if row.kind is FieldKind.INTEGER else "any",
    }
