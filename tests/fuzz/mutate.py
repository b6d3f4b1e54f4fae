"""Changes that keep the shape of JSON, so that inputs get past the parser: a value becomes another one, goes,
comes twice, or changes its place or its name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 64, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30),
    *(0.0, -0.0, 0.5, 1e-45, 1e308, -1e308, "", "\0", "\ud800", "a", "▁", "0", "null", "../x", "a" * 300),
    *([], {}, [[]], [None], [0, 0], [""], {"": None}, {"a": {"a": {}}}, [1, "a", None]),
)
Place = tuple[Any, Any]  # a container, and the key or index in it


def mutate_json(data: bytes, max_size: int, seed: int, words: tuple[str, ...] = ()) -> bytes:
    """As atheris wants a mutator. words: keys and texts that mean something here."""
    import atheris

    random = Random(seed)
    value = _parsed(data)
    if value is None or random.random() < 0.1:
        return atheris.Mutate(data, max_size)
    return json.dumps(change_values(value, random, words, atheris.Mutate)).encode()[:max_size]


def change_values(value: Any, random: Random, words: tuple[str, ...], mutate: Callable[[bytes, int], bytes]) -> Any:
    """The value after one to four changes. mutate: changes bytes, to at most a given number."""
    root = [value]
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        _change(root, random, words, mutate)
    return root[0]


def mutate_safetensors(data: bytes, max_size: int, seed: int) -> bytes:
    """The header as JSON, with a length that fits it, or bytes of the file."""
    import atheris

    random = Random(seed)
    length = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    if random.random() < 0.2 or _parsed(data[8 : 8 + length]) is None:
        return atheris.Mutate(data, max_size)
    rest = data[8 + length :]
    header = mutate_json(data[8 : 8 + length], max(0, max_size - 8 - len(rest)), seed)
    return (struct.pack("<Q", len(header)) + header + rest)[:max_size]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _change(root: list[Any], random: Random, words: tuple[str, ...], mutate: Callable[[bytes, int], bytes]) -> None:
    places = list(_places(root))
    container, key = random.choice(places)
    what = random.randrange(8)
    if what == 0 and container is not root:
        del container[key]
    elif what == 1 and isinstance(container, list) and container is not root:
        container.insert(key, deepcopy(container[key]))
    elif what == 2:
        other, place = random.choice(places)
        container[key] = deepcopy(other[place])
    elif what == 3 and isinstance(container, dict):
        container[random.choice([*words, *container])] = deepcopy(container[key])
    elif what <= 5:
        container[key] = _tweaked(container[key], random, words, mutate)
    else:
        container[key] = deepcopy(random.choice([*VALUES, *words]))


def _tweaked(value: Any, random: Random, words: tuple[str, ...], mutate: Callable[[bytes, int], bytes]) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return random.choice((value + 1, value - 1, -value, value * 2, value // 2, value * 256, _as_float(value)))
    if isinstance(value, float):
        return random.choice((-value, value * 2, value / 3, value + 1e-9))
    if isinstance(value, str):
        changed = mutate(value.encode("utf-8", "surrogatepass"), len(value) + 8).decode("utf-8", "replace")
        return random.choice((changed, value * 2, value[:-1], value + random.choice(words or ("x",))))
    return deepcopy(random.choice(VALUES))


def _as_float(value: int) -> float:
    """The value; infinity beyond the range of floats."""
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _places(container: Any) -> Iterator[Place]:
    """All values within, outermost first."""
    layer = [container]
    while layer:
        found = [(c, k) for c in layer for k in (c if isinstance(c, dict) else range(len(c)))]
        yield from found
        layer = [c[k] for c, k in found if isinstance(c[k], dict | list)]
