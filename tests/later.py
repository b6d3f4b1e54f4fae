"""Packages that take seconds to import, imported only when one of their names is used: every worker collects all
tests, and few workers run those that need such a package."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Later:
    """Stands for a package: `anthropic = Later("anthropic")` in place of `import anthropic`."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what pytest looks for in everything that it collects
            raise AttributeError(name)
        return getattr(import_module(self._package), name)


anthropic, openai = map(Later, ("anthropic", "openai"))
