"""Values of options as people write them: sizes in bytes, numbers of tokens, number formats under their short names."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import typer

_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _BYTES |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}
_TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_FORMATS = {
    **dict.fromkeys(("bf16",), "bfloat16"),
    **dict.fromkeys(("f16", "fp16", "half"), "float16"),
    **dict.fromkeys(("f32", "fp32", "float"), "float32"),
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """How the values of an option are written. parse: raises typer.BadParameter. metavar: the value's name in help."""

    parse: Callable[[str], int | str]
    metavar: str


def parse_bytes(text: str) -> int:
    """8GB is 8 * 10^9 bytes, 8GiB and 8G are 8 * 2^30, 8 is 8."""
    return _whole(text, _BYTES, "a size such as 8GB (10^9 bytes), 8GiB (2^30) or 512MB")


def parse_tokens(text: str) -> int:
    """4k is 4096 tokens."""
    return _whole(text, _TOKENS, "a number of tokens such as 4096 or 4k")


def parse_format(text: str) -> str:
    """bf16 is bfloat16. Other names stay as they are; the engine checks them."""
    return _FORMATS.get(text.lower(), text)


QUANTITIES = {
    "bytes": Quantity(parse_bytes, "SIZE"),
    "tokens": Quantity(parse_tokens, "TOKENS"),
    "format": Quantity(parse_format, "FORMAT"),
}


def _whole(text: str, units: dict[str, int], expected: str) -> int:
    found = _NUMBER.fullmatch(str(text).strip())
    factor = units.get(found[2].lower()) if found else None
    if found is None or factor is None:
        raise typer.BadParameter(f"{text!r} is not {expected}")
    number = int(found[1]) * factor if found[1].lstrip("-").isdigit() else float(found[1]) * factor
    if number != int(number):
        raise typer.BadParameter(f"{text!r} is no whole number; expected {expected}")
    return int(number)
