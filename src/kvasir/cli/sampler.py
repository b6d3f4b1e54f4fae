"""Sampling options of `kvasir run` and `kvasir chat`, in addition to --temperature and --seed."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any

from kvasir.config import option
from kvasir.errors import ConfigError, InvalidRequest
from kvasir.fields import FIELDS, FieldKind
from kvasir.types import StructuredOutputs

# ruff: noqa: RUF009 - what `option` makes is a field

MAX_FILE_BYTES = 1 << 20
FILES = ("json_schema", "grammar")

_TYPES = {FieldKind.NUMBER: float, FieldKind.INTEGER: int, FieldKind.CHOICE: int}
_OTHERS = ("n", "logprobs", "prompt_logprobs")  # which a terminal does not show
NUMBERS = {row.name: _TYPES[row.kind] for row in FIELDS if row.kind in _TYPES and row.name not in _OTHERS}
_FLAGS = [(row.name, _TYPES[row.kind] | None, option(None, row.flag)) for row in FIELDS if row.flag]


@dataclass(frozen=True, slots=True)
class SamplerOptions(make_dataclass("Flags", _FLAGS, frozen=True, slots=True)):
    """See docs/sampling.md."""

    json_schema: Path | None = option(None, "File with a JSON schema for the output.")
    grammar: Path | None = option(None, "File with a Lark or GBNF grammar for the output.")

    def params(self) -> dict[str, Any]:
        """The given options, as fields of SamplingParams. Raises ConfigError for a file without a valid schema or
        grammar."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        structures = [structure(name, given.pop(name)) for name in FILES if name in given]
        if len(structures) > 1:
            raise ConfigError("--json-schema and --grammar cannot be combined", "give one of them")
        return given | ({"structured_outputs": structures[0]} if structures else {})


def structure(name: str, path: Path) -> StructuredOutputs:
    """The structured-output constraint in a file. name: json_schema or grammar. Raises ConfigError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
        return StructuredOutputs(grammar=text) if name == "grammar" else StructuredOutputs(json=json.loads(text))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}", f"name a file with a {name}") from error
    except (ValueError, RecursionError, InvalidRequest) as error:
        raise ConfigError(f"{path} holds no {name}: {error}", "name another file") from error
