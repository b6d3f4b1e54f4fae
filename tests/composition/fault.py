"""Faults, planted one at a time in a live engine: what a subtle bug would do. Each must turn its cells red, or the
matrix proves nothing.

A plant wraps a method of the engine's own objects, or changes their data, so nothing is left of it when they are gone;
the plain runs have engines of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Plant = Callable[[Any], None]  # of an EngineCore, into whose parts it reaches


@dataclass(frozen=True)
class Fault:
    """cells: names of features; every cell finds the fault. proof: not by a difference, but because a proof fails."""

    name: str
    plant: Plant
    cells: tuple[tuple[str, ...], ...]
    proof: bool = False


FAULTS: list[Fault] = []


def fault(name: str, *cells: tuple[str, ...], proof: bool = False) -> Callable:
    def planted(plant: Plant) -> Plant:
        FAULTS.append(Fault(name, plant, cells, proof))
        return plant

    return planted


def wrap(owner: Any, name: str) -> Callable:
    """Decorates what takes the place of a method: it is given the method and then its arguments."""
    method = getattr(owner, name)

    def put(instead: Callable) -> Callable:
        setattr(owner, name, functools.partial(instead, method))
        return instead

    return put
