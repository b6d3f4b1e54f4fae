"""From a user's reference to the engine's load options: paths and bundled models have precedence over names in the
store, and these over repositories of the hub."""

from __future__ import annotations

import os

from kvasir.config import EngineOptions
from kvasir.errors import ModelFileError
from kvasir.store.entry import ModelEntry
from kvasir.store.sources import is_path
from kvasir.store.store import ModelStore
from kvasir.weights.find import BUNDLED


def resolve(options: EngineOptions) -> tuple[EngineOptions, ModelEntry | None]:
    """The options with the store's model inserted, and its entry; for any other model the options unchanged, and None.
    Raises KvasirError."""
    ref = options.model
    if ref in BUNDLED or is_path(ref) or os.path.lexists(ref):
        return options, None
    store = ModelStore()
    entry = store.find(ref)
    if entry is None and "/" not in ref:
        hint = "`kvasir list` shows the store's; a repository of the hub is named as org/name"
        raise ModelFileError(f"{ref[:200]}: no such file, folder or model in the store", hint)
    return (options, None) if entry is None else (store.options(entry, options), entry)
