"""The options of `kvasir serve` for models that it loads on demand; see docs/models.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvasir.config import option

# ruff: noqa: RUF009 - what `option` makes is a field


@dataclass(frozen=True, slots=True)
class ModelsOptions:
    keep_alive: float = option(300.0, "Seconds an idle model stays loaded; 0: unload at once, -1: never unload.")
    max_loaded_models: int = option(3, "Maximum models loaded at once.")
    model_root: list[Path] | None = option(None, "Folder under which clients may name weights by path (repeatable).")
