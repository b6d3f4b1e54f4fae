"""Reads adapters for a runner: finds what they change in its model, and packs that as its executor takes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvasir.errors import ConfigError, ModelFileError, UnsupportedModel, quoted
from kvasir.lora import Adapter, AdapterFile, bind, read_adapter
from kvasir.types import AdapterInfo

CHANGED = "unload it and load it again under a name of its own, or put the file back"


class AdapterFiles(Protocol):
    """See `Runner.read_adapter` and `Runner.pack_adapter`."""

    def read(self, path: str) -> AdapterInfo: ...

    def pack(self, path: str, content: str) -> Any: ...


class NoAdapters:
    """The files of a runner that takes no adapters."""

    def read(self, path: str) -> AdapterInfo:
        raise ConfigError("this runner takes no adapters", "leave them out")

    def pack(self, path: str, content: str) -> Any:
        raise ConfigError("this runner takes no adapters", "leave them out")


class ModelAdapters:
    """Adapters of a model. model: with or without weights. config: of the model, in Hugging Face's form. executor: what
    packs them. max_rank: the greatest rank that is accepted, None for any."""

    def __init__(self, model: Any, config: Mapping[str, Any], executor: Any, max_rank: int | None = None):
        self._model, self._config, self._executor, self._max_rank = model, config, executor, max_rank

    def read(self, path: str) -> AdapterInfo:
        """Raises ModelFileError or UnsupportedModel."""
        file, adapter = self._bound(path)
        self._executor.check_adapter(adapter)
        return AdapterInfo(
            name="",
            path=str(Path(path).absolute()),
            content=file.content,
            kind=file.kind,
            rank=adapter.max_rank,
            nbytes=file.nbytes,
            base=dict(file.base),
            invocation=file.invocation,
            fixed_scale=any(m.magnitude is not None for m in (*adapter.matrices.values(), *adapter.tables.values())),
        )

    def pack(self, path: str, content: str) -> Any:
        """Raises ModelFileError if the content hash is another one, and as `read`."""
        file, adapter = self._bound(path)
        if file.content != content:
            raise changed(path)
        return self._executor.pack_adapter(adapter)

    def _bound(self, path: str) -> tuple[AdapterFile, Adapter]:
        file = read_adapter(path)
        adapter = bind(file, self._model, self._config)
        if self._max_rank is not None and adapter.max_rank > self._max_rank:
            raise UnsupportedModel(
                f"the adapter {quoted(path)} has rank {adapter.max_rank}, expected at most {self._max_rank}",
                "raise --max-lora-rank",
            )
        return file, adapter


def changed(path: str) -> ModelFileError:
    """The error for an adapter that is not what it was when it was loaded."""
    return ModelFileError(f"the adapter {quoted(path)} has changed on disk since it was loaded", CHANGED)
