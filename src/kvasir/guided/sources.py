"""Translates what clients ask for into a grammar of llguidance: its JSON form or its Lark dialect.

Only translates; `check` finds out whether a grammar is sound and can be enforced. JSON is written as by `json.dumps`,
`{"a": 1, "b": [2, 3]}`: the one spelling that models have seen most, so long runs of it are forced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.errors import InvalidRequest
from kvasir.guided.bounds import check_bounds
from kvasir.guided.cases import enforceable
from kvasir.guided.schema import prepared
from kvasir.guided.summary import Summary

# Each text has one spelling (no \uXXXX), so that a free key can never be a named key spelled differently.
_SPELLING = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


def json_schema(schema: Mapping[str, Any] | bool, lenient: bool = False) -> str:
    """The grammar of a schema. lenient: keywords that cannot be enforced are ignored instead of refused."""
    if schema is False:
        raise InvalidRequest("the schema allows nothing", "give an object")
    return f'{{"grammars": [{{"json_schema": {schema_json(schema, lenient)}}}]}}'


def json_object() -> str:
    """The grammar of any JSON object."""
    return json_schema({"type": "object"})


def regex(pattern: str) -> str:
    """The whole choice matches the pattern, in the syntax of Rust's regex crate: no lookaround, no backreferences."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_regex(pattern)


def choice(options: Sequence[str]) -> str:
    """The choice is one of these texts."""
    if not options or not all(options):
        raise InvalidRequest("an empty choice", "give texts of at least one character")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text) for text in options)


@dataclass(frozen=True, slots=True)
class Tag:
    """A value of `schema` between two texts."""

    begin: str
    schema: Mapping[str, Any] | bool
    end: str


def structural_tags(
    tags: Sequence[Tag], triggers: Sequence[str], specials: Mapping[str, int] = {}, *, at_least_one: bool = False,
    at_most_one: bool = False,
) -> str:  # fmt: skip
    """Free text in which each trigger must continue as one of the tags that begin with it; then free text again.

    specials: ids by text of the tokens that are matched by id and not as text, except tokens that end a choice.
    at_least_one: the choice does not end before a tag. at_most_one: it ends after one tag. Raises InvalidRequest if
    tags and triggers do not fit.
    """
    bodies: dict[str, list[str]] = {}
    for tag in tags:
        trigger = max((t for t in triggers if t and tag.begin.startswith(t)), key=len, default=None)
        if trigger is None:
            raise InvalidRequest(f"no trigger is the beginning of {tag.begin[:80]!r}", "give a trigger for each tag")
        value = f"%json {schema_json(tag.schema)}"
        body = [*literals(tag.begin[len(trigger) :], specials), value, *literals(tag.end, specials)]
        bodies.setdefault(trigger, []).append(" ".join(body))
    if not bodies:
        raise InvalidRequest("no tags are given", "give at least one tag")
    openings = [_opening(i, trigger, specials) for i, trigger in enumerate(bodies)]
    free = sorted(i for text, i in specials.items() if not any(t.startswith(text) for t in bodies))
    tagged = " | ".join(f"open_{i} ({' | '.join(b)})" for i, b in enumerate(bodies.values()))
    lines = [
        "%llguidance {}",
        f"start: {_order(at_least_one, at_most_one)}",
        "free: TEXT" + (f" | <[{','.join(map(str, free))}]>" if free else ""),
        r"TEXT: /(.|\n)+/",
        f"tag: {tagged}",
    ]
    return "\n".join([*lines, *openings]) + "\n"


def _order(at_least_one: bool, at_most_one: bool) -> str:
    if at_most_one:
        return "free* tag" if at_least_one else "free* tag?"
    return "free* tag (free | tag)*" if at_least_one else "(free | tag)*"


def _opening(number: int, trigger: str, specials: Mapping[str, int]) -> str:
    """The rules for free text up to a trigger. The first complete trigger wins, hence "lazy"."""
    head, *rest = literals(trigger, specials)
    if head.startswith("<["):
        return f"open_{number}: {' '.join([head, *rest])}"
    opening = " ".join([f"head_{number}", *rest])
    return f"open_{number}: {opening}\nhead_{number}[lazy]: /(.|\\n)*/ {head}"


def literals(text: str, specials: Mapping[str, int]) -> list[str]:
    """A text as Lark literals, with special tokens by id."""
    if not text:
        return []
    pattern = "|".join(map(re.escape, sorted(specials, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    return [f"<[{specials[p]}]>" if p in specials else json.dumps(p) for p in pieces if p]


# Quoted and commented parts of Lark; in GBNF, character sets are in brackets, and comments begin with #.
_LARK = re.compile(r'("(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|//[^\n]*)|(<[^<>\s"]+>)')
_GBNF = re.compile(r'("(?:\\.|[^"\\\n])*"|\[(?:\\.|[^\]\\\n])*\]|#[^\n]*)|(<[^<>\s"]+>)')


def by_id(grammar: str, specials: Mapping[str, int]) -> str:
    """A grammar in Lark or GBNF, with the special tokens that it names as <name> replaced by their ids."""

    def replaced(found: re.Match[str]) -> str:
        return f"<[{specials[found[2]]}]>" if found[2] in specials else found[0]

    return (_GBNF if "::=" in grammar else _LARK).sub(replaced, grammar)


def schema_json(schema: Mapping[str, Any] | bool, lenient: bool = False) -> str:
    """A schema in the form that llguidance reads: prepared, and with options for how its JSON is written. Raises
    InvalidRequest that names what cannot be enforced."""
    summary = Summary()
    found = enforceable(prepared(schema, lenient, summary), lenient, summary)
    options = {**_SPELLING, "lenient": lenient, "coerce_one_of": lenient}
    text = json.dumps({**(found if isinstance(found, Mapping) else {}), "x-guidance": options})
    if '"exclusiveM' in text and not lenient:  # only exclusive bounds are misread
        check_bounds(found)
    return text
