"""The identity of a model, as far as answers depend on it: the same for equal copies on several machines."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvasir.config import EngineOptions
from kvasir.types import ModelInfo
from kvasir.weights.find import find_model

SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a file of weights: reading all of it would take as long as loading it


def model_identity(options: EngineOptions, info: ModelInfo) -> str:
    """A hash, in hexadecimal, of the weights (by size and samples of each file), the configuration and the arithmetic
    of a loaded model. Raises KvasirError, OSError."""
    files = find_model(options.model, options.revision)
    ways = (info.numerics, info.dtype, options.kv_dtype, options.quantize, options.rope_scaling, options.hf_overrides)
    config = files.config.read_bytes() if files.config else b""
    parts = [repr((*ways, options.max_model_len)), hashlib.sha256(config).hexdigest(), *map(_samples, files.weights)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _samples(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d\n" % size)
        for i in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
