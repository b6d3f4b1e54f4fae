"""Answers as JSON, and as JSON only, when the user or the system prompt asks for it."""

import json
from random import Random

from .. import words
from .arithmetic import addends
from .case import Case, bot, draw, system, user

FIELDS = {
    "name": (words.person, "called {}"),
    "age": (lambda r: r.randint(3, 99), "{} years old"),
    "city": (words.town, "from {}"),
    "job": (lambda r: r.choice(words.JOBS), "working as a {}"),
    "hobby": (lambda r: r.choice(words.HOBBIES), "fond of {}"),
    "food": (lambda r: r.choice(words.FOODS), "eating {}"),
    "colour": (lambda r: r.choice(words.COLOURS), "dressed in {}"),
    "pet": (words.pet, "with a pet called {}"),
}
FORCE = [
    "Answer in JSON.",
    "Reply in JSON.",
    "Give me JSON.",
    "As JSON, please.",
    "Answer with JSON only.",
    "Use JSON.",
]
SYSTEM = [
    "Always answer in JSON.",
    "Answer in JSON only.",
    "You reply with JSON objects only.",
    "Respond in JSON.",
]


def record(rng: Random, split: str) -> Case:
    """Facts of a person from a sentence into an object."""

    def make(r: Random) -> dict:
        keys = ["name", *r.sample([k for k in FIELDS if k != "name"], r.randint(1, 3))]
        return {k: FIELDS[k][0](r) for k in keys}

    value = draw(rng, split, make, lambda v: ("record", json.dumps(v)))
    name, *rest = value.items()
    parts = [FIELDS[k][1].format(v) for k, v in rest]
    text = f"{name[1]} is {' and '.join(parts)}."
    keys = ", ".join(value)
    ask = rng.choice([
        f"{text} {rng.choice(FORCE)} Keys: {keys}.", f"Turn this into JSON with the keys {keys}: {text}",
        f"Extract {keys} as JSON: {text}", f"{text} Give me that as JSON with {keys}.",
    ])  # fmt: skip
    return _case([user(ask)], value)


def listing(rng: Random, split: str) -> Case:
    """Words into an array under a key."""
    key, pool = rng.choice([("animals", words.ANIMALS), ("foods", words.FOODS), ("things", words.THINGS),
                            ("colours", words.COLOURS), ("people", words.PEOPLE), ("towns", words.TOWNS)])  # fmt: skip
    items = draw(rng, split, lambda r: r.sample(pool, r.randint(2, 4)), lambda v: ("list", *v))
    ask = rng.choice([
        f"Put these {key} in a JSON list: {', '.join(items)}", f"{rng.choice(FORCE)} The {key} are {', '.join(items)}.",
        f"Make JSON with the key {key}: {', '.join(items)}",
    ])  # fmt: skip
    return _case([user(ask)], {key: items})


def sum_as_json(rng: Random, split: str) -> Case:
    a, b = addends(rng, split)
    question = rng.choice([f"What is {a} + {b}?", f"Add {a} and {b}.", f"How much is {a} plus {b}?"])
    return _case(_asked(rng, question), {"answer": a + b})


def fact_as_json(rng: Random, split: str) -> Case:
    land, city = rng.choice(sorted(words.CAPITALS.items()))
    return _case(_asked(rng, f"What is the capital of {land}?"), {"answer": city})


def own_keys(rng: Random, split: str) -> Case:
    """Keys and values that have to be copied, whatever they are."""

    def make(r: Random) -> dict:
        if r.random() < 0.4:
            return {k: FIELDS[k][0](r) for k in r.sample(sorted(FIELDS), r.randint(1, 3))}
        keys = dict.fromkeys(
            words.made_up(r) if r.random() < 0.5 else r.choice(words.THINGS) for _ in range(r.randint(1, 3))
        )
        return {k: r.choice([words.person(r), r.randint(0, 99), r.choice(words.COLOURS)]) for k in keys}

    value = draw(rng, split, make, lambda v: ("own", json.dumps(v)))
    pairs = " and ".join(f"{k} is {v}" for k, v in value.items())
    bare = " and ".join(f"{k} {v}" for k, v in value.items())
    ask = rng.choice([
        f"{pairs}. {rng.choice(FORCE)}", f"Write as JSON: {pairs}", f"Make a JSON object where {pairs}.",
        f"Give me a JSON object with {bare}.", f"Make JSON with {bare}.", f"Write JSON: {bare}",
    ])  # fmt: skip
    return _case([user(ask)], value)


def json_answer(rng: Random, split: str) -> Case:
    kinds = [record, record, listing, listing, sum_as_json, fact_as_json, own_keys]
    return rng.choice(kinds)(rng, split)


def _asked(rng: Random, question: str) -> list[dict]:
    if rng.random() < 0.5:
        return [system(rng.choice(SYSTEM)), user(question)]
    return [user(f"{question} {rng.choice(FORCE)}")]


def _case(prompt: list[dict], value: dict) -> Case:
    return Case("json", [*prompt, bot(json.dumps(value, ensure_ascii=False))], want=value)
