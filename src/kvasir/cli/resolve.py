"""From a user's reference to the engine's load options: paths and bundled models have precedence over names in the
store, and these over short names and repositories of the hub."""

from __future__ import annotations

import os
from dataclasses import replace

from kvasir.adapters import of_model, parse_adapters
from kvasir.config import EngineOptions
from kvasir.errors import ModelFileError
from kvasir.speculation import SOURCES, parse
from kvasir.store.entry import ModelEntry
from kvasir.store.short_names import expand
from kvasir.store.sources import is_path
from kvasir.store.store import ModelStore
from kvasir.weights.find import BUNDLED


def resolve(options: EngineOptions) -> tuple[EngineOptions, ModelEntry | None]:
    """The options with the store's models inserted, also that of a drafter, and the model's entry; None for a model
    that is not from the store. Raises KvasirError."""
    options = with_adapters(_with_drafter(options))
    store = ModelStore()
    entry, ref = _find(options.model, store)
    if entry is not None:
        return store.options(entry, options), entry
    if ref != options.model:
        options = replace(options, model=ref, served_model_name=options.served_model_name or options.model)
    return options, None


def _with_drafter(options: EngineOptions) -> EngineOptions:
    drafters = parse(options.speculate)
    store = ModelStore()
    if not drafters.source:
        return options
    entry, path = _find(drafters.source, store)
    if entry is not None:
        path = store.options(entry, EngineOptions(drafters.source)).model
    names = (f"{name}={path}" if name in SOURCES else name for name in drafters.methods)
    return replace(options, speculate=",".join(names))


def with_adapters(options: EngineOptions) -> EngineOptions:
    """The options with the paths of adapters that are named as the store names them. Raises ModelFileError, and
    ConfigError for an adapter of another model."""
    store = ModelStore()
    given = of_model(parse_adapters(options.lora or ()), options.model, options.served_model_name)
    found = [replace(one, path=_adapter_path(one.path, store)) for one in given]
    return replace(options, lora=[one.text for one in found]) if found else options


def _adapter_path(path: str, store: ModelStore) -> str:
    if os.path.lexists(local := os.path.expanduser(path)):
        return os.path.abspath(local)
    entry = None if is_path(path) else store.find(path)
    if entry is None or not entry.is_adapter:
        what = "is a model, not an adapter" if entry else "no such file, folder or adapter in the store"
        hint = "name an adapter's folder or .gguf file; `kvasir pull org/name` fetches one from the hub"
        raise ModelFileError(f"--lora {path[:200]}: {what}", hint)
    return entry.weights.path


def _find(ref: str, store: ModelStore) -> tuple[ModelEntry | None, str]:
    """The store's entry of a reference, or None and where the model is elsewhere. Raises KvasirError."""
    if ref in BUNDLED or is_path(ref) or os.path.lexists(ref):
        return None, ref
    entry = store.find(ref)
    if entry is not None or "/" in ref:
        return entry, ref
    if (found := expand(ref)) is not None:
        return None, found
    hint = (
        "`kvasir list` shows the store's; a repository of the hub is named as org/name, or by a short name: qwen3:0.6b"
    )
    raise ModelFileError(f"{ref[:200]}: no such file, folder, model in the store or short name", hint)
