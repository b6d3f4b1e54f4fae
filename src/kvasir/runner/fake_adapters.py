"""The adapters of the FakeRunner: any file, or folder of files, is one, and all that is known of it is its hash."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kvasir.errors import ModelFileError, quoted
from kvasir.runner.adapters import changed
from kvasir.types import AdapterInfo


@dataclass(frozen=True, slots=True)
class FakePacked:
    """Stands for packed matrices."""

    content: str
    nbytes: int


class FakeAdapters:
    """Of a folder with adapter_config.json, the rank, DoRA and the invocation ids are read as peft writes them."""

    def read(self, path: str) -> AdapterInfo:
        at = Path(path).absolute()
        files = sorted(f for f in at.iterdir() if f.is_file()) if at.is_dir() else [at]
        try:
            data = [(f.name if at.is_dir() else "", f.read_bytes()) for f in files]
        except OSError as error:
            raise ModelFileError(f"the adapter {quoted(path)} cannot be read: {error}", "check its path") from error
        digest, size = sha256(repr(data).encode()).hexdigest(), sum(len(part) for _, part in data)
        try:
            config = json.loads(dict(data).get("adapter_config.json", b"{}"))
        except ValueError as error:
            raise ModelFileError(f"the config of {quoted(path)} is not JSON: {error}") from error
        return AdapterInfo(
            name="",
            path=str(at),
            content=digest,
            kind="fake",
            rank=config.get("r", 8),
            nbytes=size,
            base={"name": config["base_model_name_or_path"]} if "base_model_name_or_path" in config else {},
            invocation=tuple(config.get("alora_invocation_tokens") or ()),
            fixed_scale=bool(config.get("use_dora")),
        )

    def pack(self, path: str, content: str) -> FakePacked:
        info = self.read(path)
        if info.content != content:
            raise changed(path)
        return FakePacked(content, info.nbytes)
