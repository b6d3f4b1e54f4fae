"""Gives adapters that tests make without files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.layers.adapted import adapter_of


def give(runner: Any, adapter: int, pairs: Mapping[str, Any]) -> None:
    """Packs and sets an adapter of a Runner."""
    runner.set_adapter(adapter, runner.executor.pack_adapter(adapter_of(pairs)))


def change(program: Any, adapter: int, pairs: Mapping[str, Any]) -> None:
    """Packs and sets an adapter of a Program."""
    program.set_adapter(adapter, program.pack_adapter(adapter_of(pairs)))
