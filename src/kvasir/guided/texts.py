"""Patterns of texts: what can be derived from a pattern without matching it, and patterns of all other texts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


class Unknown(Exception):
    """Something that cannot be rewritten."""


_ANY = "(?s:.*)"
_PLAIN = re.compile(r"(?:[^\\^$.|?*+()\[\]{}]|\\[^A-Za-z0-9])*")


def none_of(texts: Sequence[str]) -> str:
    """A pattern of all texts except these."""
    tree: dict[str, Any] = {}
    for text in texts:
        at = tree
        for char in text:
            at = at.setdefault(char, {})
        at[""] = {}
    return f"^(?:{_off(tree)})$"


def _off(tree: dict[str, Any]) -> str:
    """A pattern of all texts that leave the tree, or end at a node where no text ends."""
    chars = [char for char in tree if char]
    options = [f"{re.escape(char)}(?:{_off(tree[char])})" for char in chars]
    options.append(f"[^{''.join(map(_in_class, chars))}]{_ANY}" if chars else f"(?s:.){_ANY}")
    if "" not in tree:
        options.append("")
    return "|".join(options)


def _in_class(char: str) -> str:
    return "\\" + char if char in "\\]^[-&~" else char


def _literal(pattern: str) -> str | None:
    """The text that a pattern spells, if it is only a literal."""
    return re.sub(r"\\(.)", r"\1", pattern) if _PLAIN.fullmatch(pattern) else None


def spelt_out(pattern: str) -> list[str] | None:
    """The texts that a pattern matches, if it is only a choice of literals; else None."""
    found = re.fullmatch(r"\^\(?(?:\?:)?(.*?)\)?\$", pattern, re.DOTALL)
    if not found or (pattern[1:2] == "(") != (pattern[-2:-1] == ")") or ("|" in found[1] and pattern[1:2] != "("):
        return None
    texts = [_literal(part) for part in re.split(r"(?<!\\)\|", found[1])]
    return [text for text in texts if text is not None] if None not in texts else None


def prefix(pattern: str) -> str:
    """A common prefix of all texts that match a pattern, as far as a simple inspection shows it."""
    if not pattern.startswith("^") or _branches(pattern):
        return ""
    found = _PLAIN.match(pattern, 1)
    assert found
    chars = re.findall(r"\\?.", found[0], re.DOTALL)
    if pattern[found.end() :][:1] in ("?", "*", "+", "{"):  # which apply to the last character
        chars = chars[:-1]
    return "".join(char[-1] for char in chars)


def _branches(pattern: str) -> bool:
    """Whether a pattern has a choice outside of all brackets, as far as a simple inspection shows it."""
    inside = re.sub(r"\\.", "", pattern)
    inside = re.sub(r"\[[^\]]*\]", "", inside)
    while (less := re.sub(r"\([^()]*\)", "", inside)) != inside:
        inside = less
    return "|" in inside


def unlike(pattern: str) -> str:
    """A pattern of all texts that do not match this pattern. Raises Unknown."""
    texts = spelt_out(pattern)
    if texts is not None:
        return none_of(texts)
    literal = _literal(pattern.removeprefix("^"))
    if pattern.startswith("^") and literal:
        return f"^(?:{_short_of(literal)})$"
    raise Unknown("pattern")


def _short_of(text: str) -> str:
    """A pattern of all texts that do not begin with this text."""
    rest = _short_of(text[1:]) if len(text) > 1 else None
    head = f"|[^{_in_class(text[0])}]{_ANY}"
    return head if rest is None else f"{head}|{re.escape(text[0])}(?:{rest})"


_SPACES = "\\t\\n\\v\\f\\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def as_ecma(pattern: str) -> str:
    """The pattern with the white space of JavaScript in place of Rust's."""

    def replaced(found: re.Match[str]) -> str:
        if found[0] == "\\s":
            return _SPACES if _in_brackets(pattern, found.start()) else f"[{_SPACES}]"
        return f"[^{_SPACES}]" if found[0] == "\\S" else found[0]

    return re.sub(r"\\.", replaced, pattern, flags=re.DOTALL)


def _in_brackets(pattern: str, end: int) -> bool:
    before = re.sub(r"\\.", "", pattern[:end], flags=re.DOTALL)
    return before.rfind("[") > before.rfind("]")


def found_in(pattern: str, text: str) -> bool:
    """Whether a pattern matches somewhere in a text. Raises Unknown if JavaScript might differ."""
    if not (pattern + text).isascii() or "\n" in text or "\\p" in pattern or "\\c" in pattern:
        raise Unknown("a pattern")
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except (re.error, RecursionError, OverflowError):
        raise Unknown("a pattern") from None
