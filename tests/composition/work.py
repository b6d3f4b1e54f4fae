"""Cells in parts, for processes beside each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tests.composition.cells import Cell, Verdict

PART = 40  # cells that a process takes at a time


def parts(cells: Sequence[Cell]) -> list[list[tuple[str, ...]]]:
    """Those with one plain run together, for the sake of what is kept of it."""
    groups: dict[tuple, list[tuple[str, ...]]] = defaultdict(list)
    for cell in {repr(cell): cell for cell in cells}.values():
        groups[cell.base].append(tuple(cell.names))
    return [names[i : i + PART] for names in groups.values() for i in range(0, len(names), PART)]


def run_part(part: Sequence[tuple[str, ...]]) -> list[tuple[str, Verdict | str]]:
    results: list[tuple[str, Verdict | str]] = []
    for names in part:
        cell = Cell(names)
        try:
            results.append((repr(cell), cell.run()))
        except Exception as error:
            results.append((repr(cell), f"{type(error).__name__}: {error}"))
    return results
