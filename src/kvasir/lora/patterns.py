"""Regular expressions of adapter configs, matched in bounded time.

The patterns are data from strangers, and Python's `re` takes exponential time for some. A pattern here is a function
from sets of positions to sets of positions, so that no position is tried twice for the same part; a budget bounds what
remains. The syntax is that of `re` without backreferences, lookbehind, inline flags and possessive quantifiers, which
are refused; groups do not capture. Whether a text matches is exactly as in `re`, for texts without newlines.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_PATTERN = 4000  # characters
MAX_DEPTH = 40  # of nested groups
MAX_COUNT = 1000  # in {m,n}
MAX_STEPS = 5_000_000  # of all matches with one budget
_PLAIN = re.compile(r"[\w.]+", re.ASCII)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "s": str.isspace,
    "w": lambda c: c.isalnum() or c == "_",
}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}


class Budget:
    """The work that all matches of one adapter may take."""

    def __init__(self, steps: int = MAX_STEPS):
        self.left = steps

    def spend(self) -> None:
        """Raises ValueError when nothing is left."""
        self.left -= 1
        if self.left < 0:
            raise ValueError("matching takes too long")


class _Run:
    """One text that is being matched. Sets of positions are integers, with bit i for the place before character i."""

    def __init__(self, text: str, budget: Budget):
        self.text, self.spend, self._masks = text, budget.spend, {}

    def mask(self, holds: Callable[[str], bool]) -> int:
        """The positions of the characters for which `holds` is true."""
        if holds not in self._masks:
            self._masks[holds] = sum(1 << i for i, c in enumerate(self.text) if holds(c))
        return self._masks[holds]


_Node = Callable[[_Run, int], int]  # the positions after a match, from those before it


class Pattern:
    """A parsed pattern. Raises ValueError, with the reason, for one that is malformed or not supported."""

    def __init__(self, text: str):
        if len(text) > MAX_PATTERN:
            raise ValueError(f"it has {len(text)} characters, at most {MAX_PATTERN} are allowed")
        self._node = _Parser(text).parse()

    def fullmatch(self, text: str, budget: Budget) -> bool:
        """As `re.fullmatch`."""
        return bool(self._node(_Run(text, budget), 1) >> len(text) & 1)


def matches_end(key: str, name: str, budget: Budget) -> bool:
    """Whether `re.match(rf"(.*\\.)?({key})$", name)` matches: how peft compares the keys of rank and alpha
    patterns. Raises ValueError as `Pattern` does."""
    if _PLAIN.fullmatch(key):  # a name, the usual case: dots are any character
        start = len(name) - len(key)
        ends = all(a in (".", b) for a, b in zip(key, name[max(start, 0) :], strict=False))
        return start >= 0 and ends and (start == 0 or name[start - 1] == ".")
    return Pattern(rf"(.*\.)?({key})$").fullmatch(name, budget)


class _Parser:
    def __init__(self, text: str):
        self.text, self.at, self.depth = text, 0, 0

    def parse(self) -> _Node:
        node = self._alternatives()
        if self.at < len(self.text):
            self._fail("unbalanced parenthesis")
        return node

    def _fail(self, why: str) -> None:
        raise ValueError(f"{why} at character {self.at}")

    def _peek(self, text: str) -> bool:
        """Whether the text follows, which is then passed."""
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def _alternatives(self) -> _Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail("groups nested too deeply")
        nodes = [self._sequence()]
        while self._peek("|"):
            nodes.append(self._sequence())
        self.depth -= 1
        return nodes[0] if len(nodes) == 1 else _any_of(nodes)

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            node, repeats = self._atom()
            nodes.append(self._quantified(node, repeats))
        return _in_order(nodes)

    def _quantified(self, node: _Node, repeats: bool) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        if not repeats:
            self._fail("nothing to repeat")
        if not self._peek("?") and self._peek("+"):  # whether it is lazy does not change whether it matches
            self._fail("possessive quantifiers are not supported")
        if self._bounds() is not None:
            self._fail("multiple repeat")
        low, high = bounds
        if max(low, high or 0) > MAX_COUNT or (high is not None and high < low):
            self._fail(f"counts must ascend, to at most {MAX_COUNT}")
        return _repeated(node, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._peek(sign):
                return bounds
        found = _COUNT.match(self.text, self.at)
        if found is None or found[0] == "{}":
            return None
        self.at = found.end()
        low, comma, high = (found[1], found[2], found[3])
        if max(len(low), len(high)) > 9:
            self._fail(f"counts must ascend, to at most {MAX_COUNT}")
        return int(low or 0), (int(high) if high else None) if comma else int(low)

    def _atom(self) -> tuple[_Node, bool]:
        """The next part, and whether it may be repeated."""
        character = self.text[self.at]
        if character in "*+?":
            self._fail("nothing to repeat")
        self.at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return _one(self._class()), True
        if character == "\\":
            return self._escape()
        if character in "^$":
            return (_at_start if character == "^" else _at_end), False
        return _one(_ANY if character == "." else _equals(character)), True

    def _group(self) -> tuple[_Node, bool]:
        look = None
        if self._peek("?="):
            look = True
        elif self._peek("?!"):
            look = False
        elif self._peek("?P<"):
            name, found, _ = self.text[self.at :].partition(">")
            if not found or not name.isidentifier():
                self._fail("bad name of a group")
            self.at += len(name) + 1
        elif not self._peek("?:") and self._peek("?"):
            self._fail("lookbehind, flags, backreferences and atomic groups are not supported")
        node = self._alternatives()
        if not self._peek(")"):
            self._fail("missing )")
        return (node, True) if look is None else (_ahead(node, look), False)

    def _escape(self) -> tuple[_Node, bool]:
        letter = self._letter()
        if letter in "bB":
            return _boundary(letter == "b"), False
        if letter in "AZ":
            return (_at_start if letter == "A" else _at_end), False
        return _one(self._escaped(letter)), True

    def _letter(self) -> str:
        if self.at == len(self.text):
            self._fail("bad escape (end of pattern)")
        self.at += 1
        return self.text[self.at - 1]

    def _escaped(self, letter: str) -> Callable[[str], bool]:
        if letter.lower() in _CLASSES:
            holds = _CLASSES[letter.lower()]
            return holds if letter.islower() else _not(holds)
        if letter in _CONTROLS:
            return _equals(_CONTROLS[letter])
        if letter.isascii() and letter.isalnum():
            self._fail(f"the escape \\{letter} is not supported")
        return _equals(letter)

    def _class(self) -> Callable[[str], bool]:
        negated, tests, first = self._peek("^"), [], True
        while first or not self._peek("]"):
            if self.at == len(self.text):
                self._fail("unterminated character set")
            first = False
            low, test = self._member()
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high, _ = self._member()
                if not low or not high or high < low:
                    self._fail("bad character range")
                test = _between(low, high)
            tests.append(test)
        found = _some(tests)
        return _not(found) if negated else found

    def _member(self) -> tuple[str, Callable[[str], bool]]:
        """The next member of a class: its character, "" for a class of its own, and its test."""
        character = self._letter()
        if character != "\\":
            return character, _equals(character)
        letter = self._letter()
        if letter.lower() in _CLASSES:
            return "", self._escaped(letter)
        return _CONTROLS.get(letter, letter), self._escaped(letter)


def _equals(character: str) -> Callable[[str], bool]:
    return character.__eq__


def _not(holds: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda c: not holds(c)


def _some(tests: list[Callable[[str], bool]]) -> Callable[[str], bool]:
    return lambda c: any(test(c) for test in tests)


def _between(low: str, high: str) -> Callable[[str], bool]:
    return lambda c: low <= c <= high


def _any(character: str) -> bool:
    return character != "\n"


_ANY = _any


def _one(holds: Callable[[str], bool]) -> _Node:
    def node(run: _Run, starts: int) -> int:
        run.spend()
        return (starts & run.mask(holds)) << 1

    return node


def _in_order(nodes: list[_Node]) -> _Node:
    def node(run: _Run, starts: int) -> int:
        for each in nodes:
            if not starts:
                break
            starts = each(run, starts)
        return starts

    return node


def _any_of(nodes: list[_Node]) -> _Node:
    def node(run: _Run, starts: int) -> int:
        ends = 0
        for each in nodes:
            ends |= each(run, starts)
        return ends

    return node


def _repeated(inner: _Node, low: int, high: int | None) -> _Node:
    def node(run: _Run, starts: int) -> int:
        for _ in range(low):
            run.spend()
            starts = inner(run, starts)
        found = new = starts
        count = low
        while new and (high is None or count < high):
            run.spend()
            new = inner(run, new) & ~found
            found |= new
            count += 1
        return found

    return node


def _ahead(inner: _Node, wanted: bool) -> _Node:
    def node(run: _Run, starts: int) -> int:
        held = 0
        for i in range(len(run.text) + 1):
            if starts >> i & 1:
                run.spend()
                held |= (bool(inner(run, 1 << i)) is wanted) << i
        return held

    return node


def _at_start(run: _Run, starts: int) -> int:
    return starts & 1


def _at_end(run: _Run, starts: int) -> int:
    return starts & 1 << len(run.text)


def _boundary(wanted: bool) -> _Node:
    def node(run: _Run, starts: int) -> int:
        words = run.mask(_CLASSES["w"])
        edges = words ^ words << 1
        return starts & (edges if wanted else ~edges)

    return node
