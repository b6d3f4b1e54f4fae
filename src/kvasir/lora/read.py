"""Reads an adapter in whichever form it has."""

from __future__ import annotations

from pathlib import Path

from kvasir.errors import KvasirError, ModelFileError
from kvasir.json_file import read_json_object
from kvasir.lora.adapter import AdapterFile
from kvasir.lora.config import CONFIG, MAX_CONFIG_BYTES
from kvasir.lora.gguf import read_gguf
from kvasir.lora.mlx import read_mlx
from kvasir.lora.peft import read_peft
from kvasir.lora.tasks import read_task, split_task
from kvasir.weights.gguf import GGUFFile

_MLX = ("fine_tune_type", "lora_parameters")


def is_adapter(path: Path) -> bool:
    """Whether a folder or file holds an adapter rather than a model; False for what is damaged or missing."""
    try:
        if path.is_dir():
            return (path / CONFIG).is_file() and not (path / "config.json").exists()
        if path.suffix != ".gguf" or not path.is_file():
            return False
        with GGUFFile(path) as file:
            kind = file.metadata.get("general.type")
            return isinstance(kind, str) and kind == "adapter"
    except (KvasirError, OSError):
        return False


def read_adapter(path: str | Path) -> AdapterFile:
    """The adapter in a folder (peft or mlx-lm) or a GGUF file, or of a task of a model (FOLDER#TASK), checked as far as
    that is possible without its model.

    Raises ModelFileError for what is missing, damaged or does not fit together, UnsupportedModel for kinds of adapters
    that have no code here; nothing that could run code is opened.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path}: expected a folder or a .gguf file", "name the adapter's folder")
        return read_gguf(path)
    if found := split_task(path):
        return read_task(*found)
    if not (path / CONFIG).is_file():
        raise ModelFileError(f"{path}: there is no {CONFIG}", "name the folder of an adapter, or its .gguf file")
    config = read_json_object(path / CONFIG, MAX_CONFIG_BYTES)
    if "peft_type" not in config and any(name in config for name in _MLX):
        return read_mlx(path)
    return read_peft(path)
