"""Typical grammars of requests, as measured by `kvasir bench grammar`. All were written for this benchmark."""

from __future__ import annotations

from typing import Any

from kvasir.guided import sources
from kvasir.guided.tools import Function, tool_grammar
from kvasir.parse.table import choose

Schema = dict[str, Any]

TEXT, NUMBER, INTEGER, BOOLEAN = ({"type": kind} for kind in ("string", "number", "integer", "boolean"))
DATE, TIME = ({"type": "string", "format": name} for name in ("date", "date-time"))


def record(optional: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """An object with only these properties."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def one_of(*values: str | int | None) -> Schema:
    return {"enum": list(values)}


def some(items: Schema, least: int = 0, most: int = 8) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


ADDRESS = record(
    ("line2",),
    street=text(60),
    line2=text(60),
    city=text(40),
    zip={"type": "string", "pattern": "^[0-9]{5}$"},
    country={"type": "string", "pattern": "^[A-Z]{2}$"},
)
MONEY = record(amount={"type": "number", "minimum": 0}, currency=one_of("EUR", "USD", "GBP", "JPY", "CHF", "SEK"))
COUNTRIES = (
    *("Argentina", "Australia", "Austria", "Belgium", "Brazil", "Canada", "Chile", "China", "Colombia", "Denmark"),
    *("Egypt", "Ethiopia", "Finland", "France", "Germany", "Ghana", "Greece", "Iceland", "India", "Indonesia"),
    *("Ireland", "Italy", "Japan", "Kenya", "Mexico", "Morocco", "Netherlands", "New Zealand", "Nigeria", "Norway"),
    *("Pakistan", "Peru", "Poland", "Portugal", "South Africa", "South Korea", "Spain", "Sweden", "Switzerland"),
    *("Turkey", "Ukraine", "United Kingdom", "United States", "Uruguay", "Vietnam"),
)
EXPRESSION: Schema = {
    "$ref": "#/$defs/expression",
    "$defs": {
        "expression": {"anyOf": [{"$ref": "#/$defs/comparison"}, {"$ref": "#/$defs/group"}]},
        "comparison": record(
            field=text(30), is_=one_of("=", "<", ">", "in", "like"), value={"anyOf": [TEXT, NUMBER, BOOLEAN]}
        ),
        "group": record(all=some({"$ref": "#/$defs/expression"}, 1, 4)),
    },
}

SCHEMAS: dict[str, Schema | bool] = {
    "yes or no": record(answer=BOOLEAN),
    "sentiment": record(
        label=one_of("positive", "neutral", "negative"), confidence={**NUMBER, "minimum": 0, "maximum": 1}
    ),
    "contact": record(("phone",), name=text(50), email={"type": "string", "format": "email"}, phone=text(20)),
    "weather": record(
        ("unit",), city=text(40), unit=one_of("celsius", "fahrenheit"), days={**INTEGER, "minimum": 1, "maximum": 14}
    ),
    "summary": record(title=text(80), points=some(text(200), 1, 5), keywords=some(text(30), 0, 10)),
    "event": record(
        ("place", "notes"), title=text(80), begins=TIME, ends=TIME, place=ADDRESS, guests=some(text(50)), notes=TEXT
    ),
    "invoice": record(
        ("due",),
        number=text(20),
        issued=DATE,
        due=DATE,
        buyer=record(name=text(60), address=ADDRESS),
        total=MONEY,
        lines=some(record(what=text(80), quantity=INTEGER, price=MONEY, tax=one_of("none", "reduced", "full")), 1, 20),
    ),
    "resume": record(
        name=text(60),
        skills=some(text(30), 0, 20),
        jobs=some(
            record(("until",), title=text(60), employer=text(60), since=DATE, until=DATE, did=some(text(200), 0, 6)),
            0,
            10,
        ),
        schools=some(record(name=text(60), degree=one_of("none", "bachelor", "master", "doctor"), year=INTEGER), 0, 5),
    ),
    "transfer": record(
        iban={"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}[A-Z0-9]{11,30}$"},
        amount=MONEY,
        on=DATE,
        reference={"type": "string", "pattern": "^[A-Za-z0-9 .,-]{1,35}$"},
    ),
    "recipe": record(
        name=text(60),
        serves=INTEGER,
        steps=some(text(300), 1, 12),
        needs=some(record(what=text(40), amount=NUMBER, unit=one_of("g", "ml", "piece", "spoon", "cup", None)), 1, 20),
    ),
    "issue": record(
        kind=one_of("bug", "feature", "question", "docs"),
        severity={**INTEGER, "minimum": 1, "maximum": 5},
        area=text(30),
        labels=some(one_of("good first issue", "help wanted", "regression", "security", "performance", "duplicate")),
        assignee={"anyOf": [text(40), {"type": "null"}]},
    ),
    "country": record(country=one_of(*COUNTRIES), capital=text(30)),
    "filter": EXPRESSION,
    "shape": record(
        type=one_of("Polygon"),
        coordinates=some(
            some({"type": "array", "prefixItems": [NUMBER, NUMBER], "items": False, "minItems": 2}, 4, 40), 1, 3
        ),
    ),
    "settings": {"type": "object", "additionalProperties": {"anyOf": [TEXT, NUMBER, BOOLEAN, some(TEXT)]}},
    "any object": {"type": "object"},
}

TOOLS = (
    Function("get_weather", SCHEMAS["weather"]),  # type: ignore[arg-type]
    Function("send_money", SCHEMAS["transfer"]),  # type: ignore[arg-type]
    Function("add_event", SCHEMAS["event"]),  # type: ignore[arg-type]
    Function("search", record(("limit",), query=text(200), limit=INTEGER, where=EXPRESSION["$defs"]["comparison"])),
    Function("run_command", record(("timeout",), command=some(text(100), 1, 16), timeout=INTEGER)),
    Function("read_file", record(("first", "last"), path=text(200), first=INTEGER, last=INTEGER)),
    Function("now", {}),
)


def grammars() -> dict[str, str]:
    """The grammars by name, in the form that guides read."""
    found = {name: sources.json_schema(schema) for name, schema in SCHEMAS.items()}
    for name in ("hermes", "qwen3_coder", "pythonic"):
        found[f"tools, {name}"] = tool_grammar(choose(tools=name), TOOLS, {}, required=True)
    found["a date, a regex"] = sources.regex(r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])")
    found["one of 45 texts"] = sources.choice(COUNTRIES)
    return found
