"""The changes of a GGUF adapter under the names of the base model's checkpoint, and in its order of rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.lora.adapter import AdapterFile, Update
from kvasir.models.gguf_view import HFView

# Model types whose GGUF files have another architecture's name.
_TYPES = {
    "llama": ("llama", "mistral", "mixtral"),
    "command-r": ("cohere",),
    "deepseek2": ("deepseek_v2", "deepseek_v3"),
    "granitehybrid": ("granitemoehybrid",),
    "mistral3": ("ministral3",),
}


def checkpoint_updates(file: AdapterFile, config: Mapping[str, Any]) -> Iterable[Update]:
    """The file's updates by modules of a checkpoint, experts one by one. config: of the base model.

    Raises ModelFileError for names that the architecture does not have, UnsupportedModel for another architecture than
    the base model's, or an order of rows that has no code."""
    architecture, kind = file.base["architecture"], str(config.get("model_type"))
    if _plain(architecture) != _plain(kind.removesuffix("_text")) and kind not in _TYPES.get(architecture, ()):
        raise UnsupportedModel(
            f"{file.path}: the adapter's architecture is {quoted(architecture)}, the model's type {quoted(kind)}",
            "use an adapter of this model",
        )
    stored = {update.module: update for update in file.updates}
    view = HFView(_Outputs(stored), config, architecture)
    found: list[str] = []
    for name in view.names():
        module, index = view.place(name)
        update = stored[module]
        if update.stacked != (index is not None) or not name.endswith(".weight"):
            raise UnsupportedModel(f"the adapter changes {quoted(module)}, which is computed in another form here")
        a, b = (update.a, update.b) if index is None else (update.a[index], update.b[index])
        found.append(module)
        yield replace(
            update, module=name.removesuffix(".weight"), a=a, b=view.outputs(name, b), experts=1, stacked=False
        )
    if unknown := stored.keys() - found:
        raise ModelFileError(f"the adapter changes {quoted(min(unknown))}, which is no matrix")


def _plain(name: str) -> str:
    return name.replace("-", "").replace("_", "")


class _Outputs:
    """As the source of a GGUF file's tensors: the shapes of b, which has the rows of the matrix that it changes."""

    def __init__(self, updates: Mapping[str, Update]):
        self._updates = updates

    def names(self) -> Iterable[str]:
        return self._updates.keys()

    def info(self, name: str) -> Any:
        return SimpleNamespace(shape=self._updates[name].b.shape)

    def raw(self, name: str) -> np.ndarray:
        raise NotImplementedError("there are shapes only")

    def array(self, name: str, index: int | None = None) -> np.ndarray:
        raise NotImplementedError("there are shapes only")

    def drop(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass
