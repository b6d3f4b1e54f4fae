"""The files that list the models: one file per model, of mode 0600, replaced atomically."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvasir.errors import InvalidRequest, KvasirError, ModelFileError
from kvasir.store.entry import ModelEntry
from kvasir.store.files import make_folder, write_whole
from kvasir.store.names import Name
from kvasir.store.parameters import check_parameters

log = logging.getLogger("kvasir.store")

MAX_BYTES = 16 << 20
_SUFFIX = ".json"


class Manifests:
    """Owns a folder. Entries are cached until their files change."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._read: dict[str, tuple[tuple[int, int, int], ModelEntry]] = {}

    def all(self) -> Iterator[ModelEntry]:
        """All entries; damaged manifests are skipped and logged. Raises KvasirError."""
        try:
            with os.scandir(self._folder) as files:
                names = sorted(file.name for file in files if file.name.endswith(_SUFFIX) and file.name[0] != ".")
        except FileNotFoundError:
            return
        except OSError as error:
            raise KvasirError(f"{self._folder}: {error.strerror}", "check the store's folder") from error
        for name in names:
            try:
                entry = self._load(name)
            except ModelFileError as error:
                log.warning("%s", error)
                continue
            if entry is not None:
                yield entry

    def read(self, name: Name) -> ModelEntry | None:
        """The entry, or None if there is none. Raises ModelFileError for a damaged manifest."""
        return self._load(name.key + _SUFFIX)

    def write(self, entry: ModelEntry) -> None:
        """Raises InvalidRequest if the texts of a model are too long or not valid Unicode."""
        try:
            data = msgspec.json.format(msgspec.json.encode(entry), indent=1)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"{entry.name}: a text contains a lone surrogate", "send valid Unicode") from error
        if len(data) > MAX_BYTES:
            raise InvalidRequest(f"{entry.name}: its texts take {len(data)} bytes", f"at most {MAX_BYTES}")
        write_whole(make_folder(self._folder) / (entry.parsed.key + _SUFFIX), data)

    def remove(self, name: Name) -> None:
        (self._folder / (name.key + _SUFFIX)).unlink(missing_ok=True)

    def _load(self, file_name: str) -> ModelEntry | None:
        path = self._folder / file_name
        try:
            with path.open("rb") as file:
                facts = os.fstat(file.fileno())
                stamp = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
                kept = self._read.get(file_name)
                if kept is not None and kept[0] == stamp:
                    return kept[1]
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            self._read.pop(file_name, None)
            return None
        except OSError as error:
            raise ModelFileError(f"{path}: {error.strerror}", "repair or remove it") from error
        entry = _decode(data, path)
        assert entry.digest, "created once and kept with the entry"
        self._read[file_name] = (stamp, entry)
        return entry


def _decode(data: bytes, path: Path) -> ModelEntry:
    try:
        if len(data) > MAX_BYTES:
            raise ModelFileError(f"more than {MAX_BYTES} bytes")
        entry = msgspec.json.decode(data, type=ModelEntry)
        if entry.parsed.key + _SUFFIX != path.name:
            raise ModelFileError(f"it belongs to {entry.name}")
        if not all(Path(weights.path).is_absolute() for weights in entry.all_weights):
            raise ModelFileError("its weights are at a relative path")
        check_parameters(entry.parameters)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KvasirError) as error:
        raise ModelFileError(
            f"{path}: not a manifest of a model: {error}", "remove it, and pull the model again"
        ) from error
    return entry
