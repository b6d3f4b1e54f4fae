"""A model in one or several GGUF files: `name-00001-of-00003.gguf` and its siblings, presented as one.

Source: the split files of llama.cpp (gguf-split). Parts have `split.no` (from 0), `split.count` and
`split.tensors.count`; the first part has the model's metadata, and each part its own tensors.
"""

import re
from pathlib import Path

import numpy as np

from kvasir.errors import ModelFileError, quoted
from kvasir.weights.gguf import GGUFFile, GGUFTensor

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_NAMED = 5  # missing parts that an error lists by name


def split_names(name: str) -> list[str]:
    """The file names of all parts of the model that `name` belongs to; only `name` if it is not split."""
    match = _PART_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["number"]) <= int(match["count"]):
        return [name]
    count = match["count"]
    return [f"{match['stem']}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def split_paths(path: Path) -> list[Path]:
    """The paths of all parts in the folder of `path`. Raises `ModelFileError` that lists missing parts."""
    names = split_names(path.name)
    if len(names) > 1:
        present = {file.name for file in path.parent.glob("*.gguf")}
        missing = [name for name in names if name not in present]
        if missing:
            listed = ", ".join(missing[:_NAMED]) + (" and more" if len(missing) > _NAMED else "")
            raise ModelFileError(
                f"{path}: {len(missing)} of the model's {len(names)} parts are missing: {listed}",
                "put all parts into one folder",
            )
    return [path.with_name(name) for name in names]


class GGUFModel:
    """One view over all parts of a model. metadata: from the first part. tensors: of all parts."""

    def __init__(self, parts: list[GGUFFile]):
        """Takes ownership of `parts`, given in order. Raises `ModelFileError` if they do not belong together."""
        self.parts = parts
        self.metadata = parts[0].metadata
        self.tensors: dict[str, GGUFTensor] = {}
        self._part_of: dict[str, GGUFFile] = {}
        for number, part in enumerate(parts):
            _check_place(part, number, len(parts))
            for name, tensor in part.tensors.items():
                if name in self.tensors:
                    raise ModelFileError(f"{part.path}: tensor {name!r} is in {self.part(name).path} too")
                self.tensors[name] = tensor
                self._part_of[name] = part
        expected = _number(parts[0], "split.tensors.count", len(self.tensors))
        if len(self.tensors) != expected:
            raise ModelFileError(
                f"{parts[0].path}: the parts hold {len(self.tensors)} tensors, expected {expected}",
                "are all parts of the same model?",
            )

    def part(self, name: str) -> GGUFFile:
        """The file that holds a tensor."""
        return self._part_of[name]

    def data(self, name: str) -> np.ndarray:
        """A tensor's bytes: uint8 [rows, bytes per row], a read-only view of the mapping."""
        return self.part(name).data(name)

    def drop(self, name: str) -> None:
        """Returns a tensor's pages to the system."""
        self.part(name).drop(name)

    def close(self) -> None:
        """Unmaps all parts when their last views are gone."""
        for part in self.parts:
            part.close()

    def __enter__(self) -> "GGUFModel":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def open_gguf(path: str | Path) -> GGUFModel:
    """Opens the model at `path`, which may be any of its parts. Raises `ModelFileError`."""
    parts: list[GGUFFile] = []
    try:
        for part_path in split_paths(Path(path)):
            parts.append(GGUFFile(part_path))
        return GGUFModel(parts)
    except BaseException:
        for part in parts:
            part.close()
        raise


def _check_place(part: GGUFFile, number: int, count: int) -> None:
    declared = _number(part, "split.no", 0), _number(part, "split.count", 1)
    # A file that is not split may have a count of 0.
    if declared != (number, count) and not (count == 1 and declared == (0, 0)):
        raise ModelFileError(
            f"{part.path}: its metadata declares part {declared[0]} (from 0) of {declared[1]}, "
            f"its name gives part {number} of {count}",
            "restore the original file names",
        )


def _number(part: GGUFFile, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int:
        raise ModelFileError(f"{part.path}: {key} is {quoted(value)}, expected a number", "the file is damaged")
    return value
