#!/usr/bin/env python3
"""Generates csrc/sampler_fields.h and the table in docs/sampling.md from the table of request fields in
kvasir/fields.py.

python scripts/make_fields.py            writes both
python scripts/make_fields.py --check    exits with 1 if one of them is stale
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvasir.fields import FIELDS, LAYOUT, NATIVE, FieldKind, FieldRow

ROOT = Path(__file__).resolve().parents[1]
HEADER, PAGE = ROOT / "csrc" / "sampler_fields.h", ROOT / "docs" / "sampling.md"
BEGIN, END = "<!-- fields: made by scripts/make_fields.py -->", "<!-- end of fields -->"
DIALECTS = {"openai": "OpenAI", "anthropic": "Anthropic", "ollama": "Ollama", "llamacpp": "llama.cpp",
            "tgi": "TGI", "sglang": "SGLang", "modelfile": "Modelfile"}  # fmt: skip


def header() -> str:
    """The first members of SampleRow; sampler.h includes them in the structure."""
    members = "".join(f"    {row.native} {row.name};\n" for row in NATIVE)
    return (
        "// Made by scripts/make_fields.py from kvasir/fields.py: the first members of SampleRow. Included there.\n"
        f"{members}#define KVASIR_SAMPLER_LAYOUT {LAYOUT:#x}\n"
    )


def table() -> str:
    lines = ["| field | values | default | where | dialects | |", "|---|---|---|---|---|---|"]
    lines += [f"| `{row.name}` | {_values(row)} | {_default(row)} | {row.where} | {_names(row)} | {row.doc} |"
              for row in FIELDS]  # fmt: skip
    return "\n".join(lines) + "\n"


def _values(row: FieldRow) -> str:
    if row.kind is FieldKind.CHOICE:
        return ", ".join(f"{value} ({meaning})" for value, meaning in row.choices.items())
    if row.kind in (FieldKind.NUMBER, FieldKind.INTEGER):
        bracket = "(" if row.open_low else "["
        return f"{row.kind.value} in {bracket}{_short(row.low)}, {_short(row.high)}]"
    return row.kind.value + (f", at most {row.most}" if row.most else "")


def _short(value: float) -> str:
    """The value as text; bounds of machine words as powers of two."""
    for bits in (31, 63, 64):
        for power, text in ((2**bits, f"2^{bits}"), (2**bits - 1, f"2^{bits} - 1"), (-(2**bits), f"-2^{bits}")):
            if value == power:
                return text
    return f"{value:g}"


def _default(row: FieldRow) -> str:
    if row.default in (None, (), {}):
        return "none"
    texts = row.default if isinstance(row.default, tuple) else (row.default,)
    return " ".join(f"`{text!r}`" if isinstance(text, str) else str(text).lower() for text in texts)


def _names(row: FieldRow) -> str:
    """The dialects that have the field, each with its own name for the field if that differs."""
    return ", ".join(
        f"{title} (`{row.names[key]}`)" if row.names[key] else title
        for key, title in DIALECTS.items()
        if key in row.names
    ) + (f"; `--{row.name.replace('_', '-')}`" if row.flag else "")


def page(text: str) -> str:
    """The page with the current table."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + "\n\n" + table() + "\n" + END + rest.partition(END)[2]


def made() -> dict[Path, str]:
    return {HEADER: header(), PAGE: page(PAGE.read_text())}


def main() -> int:
    stale = [path for path, text in made().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is stale; run python {__file__}")
        return 1 if stale else 0
    for path, text in made().items():
        path.write_text(text)
    print(f"updated {', '.join(path.name for path in stale) or 'no file: all are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
