"""docs/composition.md, made of verdicts and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.composition.cells import Cell, Verdict
from tests.composition.feature import Feature
from tests.composition.features import FEATURES, together
from tests.composition.sets import COUNT, REAL, SEED, pairs

PATH = Path(__file__).parents[2] / "docs" / "composition.md"
Verdicts = Mapping[str, Verdict]

_HEAD = """# What goes together

Made by `make composition`; not written by hand. `make test` runs a sample of it.

A cell is a set of features. Its requests run with all of them on, and each answer is compared with that of a plain run:
the request alone, one at a time, everything off, on the same executor, weights, cache format and model. Tokens, the raw
bits of all log-probabilities, finish reasons and text must be **equal**. What an engine does not do it must have
**refused** with a message, before it computes. A cell in which a feature was not at work does not count, so each has a
proof that is counted. `tests/composition/fault.py` plants faults and sees each of them found.
"""


def render(verdicts: Verdicts) -> str:
    """verdicts: by the text of their cells."""
    of_pairs = {repr(cell): verdicts[repr(cell)] for cell in pairs()}
    return "\n".join([_HEAD, _features(), _pairs(of_pairs), _refused(of_pairs), _real(verdicts), _SOME])


def _features() -> str:
    rows = [f"| {i} | {f.name} | {f.proof} |" for i, f in enumerate(FEATURES, 1)]
    return "\n".join(["## Features", "", "| | feature | proof |", "|---|---|---|", *rows, ""])


def _pairs(verdicts: Verdicts) -> str:
    equal = sum(found.word == "equal" for found in verdicts.values())
    width, numbers = max(len(f.name) for f in FEATURES), [f"{i:>3}" for i in range(1, len(FEATURES) + 1)]
    lines = [" " * (width + 5) + "".join(n[digit] for n in numbers).rstrip() for digit in range(3)]
    for i, a in enumerate(FEATURES):
        marks = "".join(_mark(verdicts, a, b) for b in FEATURES[: i + 1])
        lines.append(f"{numbers[i]} {a.name:<{width}} {marks}".rstrip())
    return f"""## Pairs

{len(verdicts)} cells: each feature alone, and each pair that can be chosen. {equal} are equal, {len(verdicts) - equal}
refused.

`=` equal, `r` refused; blank where both are positions of one switch, or one cannot be counted beside the other.

```text
{chr(10).join(lines)}
```
"""


def _mark(verdicts: Verdicts, a: Feature, b: Feature) -> str:
    if a is not b and (a.switch == b.switch or not together((a.name, b.name))):
        return " "
    return {"equal": "=", "refused": "r"}[verdicts[repr(Cell({a.name, b.name}))].word]


def _refused(verdicts: Verdicts) -> str:
    messages: dict[str, list[str]] = {}
    for name, found in verdicts.items():
        if found.word == "refused":
            messages.setdefault(found.message, []).append(name)
    rows = [f"| {message} | {', '.join(names)} |" for message, names in messages.items()]
    return "\n".join(["## Refused", "", "| message | pairs |", "|---|---|", *rows, ""])


def _real(verdicts: Verdicts) -> str:
    rows = [f"| {why} | {Cell(names)} | {verdicts[repr(Cell(names))].word} |" for why, names in REAL.items()]
    return "\n".join(["## What people run", "", "| | features | |", "|---|---|---|", *rows, ""])


_SOME = f"""## By chance

{COUNT} sets of three to nine features that no engine refuses, from seed {SEED}: all equal.
"""
