"""The source of a model's weights: one protocol for all formats, from which the loader reads tensor by tensor."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import ml_dtypes
import numpy as np

from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.weights.gguf_split import GGUFModel, open_gguf
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.safetensors import SafetensorsFolder

_PLAIN_GGML = {
    GGMLType.F32: np.dtype(np.float32),
    GGMLType.F16: np.dtype(np.float16),
    GGMLType.BF16: np.dtype(ml_dtypes.bfloat16),
    GGMLType.F64: np.dtype(np.float64),
    GGMLType.I8: np.dtype(np.int8),
    GGMLType.I16: np.dtype(np.int16),
    GGMLType.I32: np.dtype(np.int32),
    GGMLType.I64: np.dtype(np.int64),
}


class WeightSource(Protocol):
    """Named tensors in any format. Unknown names raise `KeyError`.

    Arrays may share memory with a mapped file, so callers must not modify them.
    """

    def names(self) -> Iterable[str]:
        """The names of all tensors, in the file's order."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Shape, format and size of a tensor; reads no weights."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """A tensor's bytes as stored in the file, uint8, for packing."""
        ...

    def array(self, name: str) -> np.ndarray:
        """A tensor in the file's number type (bfloat16 and float8 are ml_dtypes'), float32 if it is quantized."""
        ...

    def drop(self, name: str) -> None:
        """Declares that a tensor's file pages are no longer needed. Copies stay valid."""
        ...

    def close(self) -> None:
        """Closes the files. Existing views stay valid."""
        ...


class SafetensorsSource:
    """The tensors of a safetensors file or folder. metadata: the free-form part of the headers."""

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` if the files are missing or malformed."""
        self._folder = SafetensorsFolder(path)
        self.metadata = self._folder.metadata
        self.names = self._folder.names
        self.info = self._folder.info
        self.raw = self._folder.raw
        self.array = self._folder.array
        self.drop = self._folder.drop
        self.close = self._folder.close


class JoinedSource:
    """The tensors of several sources, each under its prefix."""

    def __init__(self, sources: Mapping[str, WeightSource]):
        self._sources = dict(sources)
        self._of = {f"{prefix}{name}": (source, name) for prefix, source in sources.items() for name in source.names()}

    def names(self) -> Iterable[str]:
        """The names of all tensors, source by source."""
        return self._of.keys()

    def info(self, name: str) -> TensorInfo:
        """As in `WeightSource`, under the joined name."""
        source, own = self._of[name]
        return replace(source.info(own), name=name)

    def raw(self, name: str) -> np.ndarray:
        """As in `WeightSource`."""
        source, own = self._of[name]
        return source.raw(own)

    def array(self, name: str) -> np.ndarray:
        """As in `WeightSource`."""
        source, own = self._of[name]
        return source.array(own)

    def drop(self, name: str) -> None:
        """As in `WeightSource`."""
        source, own = self._of[name]
        source.drop(own)

    def close(self) -> None:
        """Closes the files of all sources."""
        for source in self._sources.values():
            source.close()


class GGUFSource:
    """The tensors of a GGUF model, by their names in the file; quantized tensors are decoded on demand."""

    def __init__(self, model: GGUFModel | str | Path):
        """Takes ownership of an open model, or opens one. Raises `ModelFileError`."""
        self.model = model if isinstance(model, GGUFModel) else open_gguf(model)
        self.raw = self.model.data
        self.drop = self.model.drop
        self.close = self.model.close

    def names(self) -> Iterable[str]:
        """The names of all tensors, part by part."""
        return self.model.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """As in `WeightSource`; `dtype` is the GGML type's name."""
        tensor = self.model.tensors[name]
        return TensorInfo(name, tensor.shape, tensor.ggml_type.name, tensor.nbytes, self.model.part(name).path)

    def array(self, name: str, index: int | None = None) -> np.ndarray:
        """A view for plain number types, else decoded weights. Raises `UnsupportedModel` for Q8_1.

        index: return only this matrix of a stack; the others are not read.
        """
        tensor = self.model.tensors[name]
        if plain := _PLAIN_GGML.get(tensor.ggml_type):
            whole = self.model.part(name).array(name, plain)
            return whole if index is None else whole[index]
        shape, data = tensor.shape, self.model.data(name)
        if index is not None:
            shape, data = shape[1:], data[index * shape[1] : (index + 1) * shape[1]]
        return dequantize(np.ascontiguousarray(data), tensor.ggml_type, shape)


class DummySource:
    """Random weights of given shapes, deterministic in name, shape and seed: for tests and benchmarks.

    Matrices are normal with standard deviation 1 / sqrt(row length), so that activations keep their scale; vectors are
    0.1 x normal, around 1 if the name ends in "weight" (norms), else around 0 (biases).
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0):
        self._shapes = dict(shapes)
        self._seed = seed

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def info(self, name: str) -> TensorInfo:
        shape = self._shapes[name]
        return TensorInfo(name, shape, "F32", 4 * int(np.prod(shape)), Path())

    def raw(self, name: str) -> np.ndarray:
        return self.array(name).view(np.uint8).reshape(-1)

    def array(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        key = hashlib.blake2b(f"{self._seed} {name} {shape}".encode(), digest_size=8).digest()
        normal = np.random.Generator(np.random.Philox(int.from_bytes(key, "little")))
        values = normal.standard_normal(shape, dtype=np.float32)
        if len(shape) > 1:
            return values / np.float32(shape[-1] ** 0.5)
        return np.asarray(np.float32(0.1) * values + np.float32(name.endswith("weight")))  # also of a single number

    def drop(self, name: str) -> None:
        """Does nothing: there is no file."""

    def close(self) -> None:
        """Does nothing: there is no file."""
