"""Adapters that clients load while a server runs, and names of models that mean one with an adapter.

sql          an adapter of the only model, or of the only one that has it
base:sql     an adapter of the model `base`
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvasir.adapters import AdapterOption, is_folder_name
from kvasir.engine.front import Front
from kvasir.environment import user_path
from kvasir.errors import InvalidRequest, ModelFileError, UnsupportedModel

_FILES = ("adapter_config.json", "*.safetensors")  # what is read in a folder
_HINT = "start the server with --lora-dir FOLDER, and give a folder or file in it"


class AdapterFolders:
    """The folders from which clients may load adapters. resolves: a name that is a folder in one of them is loaded
    when a request first uses it."""

    def __init__(self, folders: Sequence[Path] = (), resolves: bool = False):
        self._folders = tuple(user_path(folder) for folder in folders)
        self.resolves = resolves
        self._loading = asyncio.Lock()

    def path(self, text: str) -> str:
        """The adapter that a client's path means: absolute, or relative to one of the folders. Raises InvalidRequest
        if it is not in them, without revealing whether it exists."""
        for folder in self._folders:
            try:
                path = folder.absolute() / text
                if path.exists() and all(self._within(one) for one in _read_of(path)):
                    return str(path)
            except (OSError, ValueError):
                continue
        raise InvalidRequest(f"{text[:200]!r} is no adapter in a folder of this server", _HINT, param="lora_path")

    def _within(self, path: Path) -> bool:
        """Whether a file that would be read is in one of the folders, links followed."""
        real = path.resolve()
        return any(real.is_relative_to(folder.resolve()) for folder in self._folders)

    def found(self, name: str) -> str | None:
        """The folder of that name directly in one of the folders; None if there is none, or names are not resolved."""
        if not self.resolves or not is_folder_name(name):
            return None
        try:
            return self.path(name)
        except InvalidRequest:
            return None

    async def ensure(self, front: Front, name: str) -> bool:
        """Whether the model has an adapter of this name, which is loaded if its folder is found. Raises as
        `AdapterShelf.load`."""
        if front.adapters.find(name):
            return True
        async with self._loading:
            if front.adapters.find(name):
                return True
            path = await asyncio.to_thread(self.found, name)
            if path is None:
                return False
            with faults_of_files():
                await front.adapters.load(AdapterOption(name, path))
            return True


@contextmanager
def faults_of_files() -> Iterator[None]:
    """Turns errors in an adapter's files into InvalidRequest."""
    try:
        yield
    except (ModelFileError, UnsupportedModel) as error:
        raise InvalidRequest(error.message, error.hint, "lora_path") from error


def _read_of(path: Path) -> Iterator[Path]:
    """The path, and the files that are read if it is a folder."""
    yield path
    if path.is_dir():
        for pattern in _FILES:
            yield from path.glob(pattern)


def split_name(name: str) -> tuple[str, str]:
    """(model, adapter) of "model:adapter"; ("", "") for a name without an adapter."""
    model, colon, adapter = name.rpartition(":")
    return (model, adapter) if colon and model and adapter else ("", "")
