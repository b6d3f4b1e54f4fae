"""The source of a model's weights: one protocol for all formats, from which the loader reads tensor by tensor."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from kvasir.quant.gguf_types import GGMLType, dequantize_into
from kvasir.weights.gguf_split import GGUFModel, open_gguf
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.safetensors import SafetensorsFolder

# Weights per decoded chunk if the result is not float32: bounds the memory used besides the result.
CHUNK = 1 << 20

_PLAIN_GGML = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
    GGMLType.F64: torch.float64,
    GGMLType.I8: torch.int8,
    GGMLType.I16: torch.int16,
    GGMLType.I32: torch.int32,
    GGMLType.I64: torch.int64,
}


class WeightSource(Protocol):
    """Named tensors in any format. Unknown names raise `KeyError`.

    Tensors and arrays may share memory with a mapped file, so callers must not modify them.
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

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the CPU as `dtype`; by default as stored, or float32 if it is quantized."""
        ...

    def drop(self, name: str) -> None:
        """Declares that a tensor's file pages are no longer needed. Copies from `tensor` stay valid."""
        ...

    def close(self) -> None:
        """Closes the files. Existing views stay valid."""
        ...


class SafetensorsSource:
    """The tensors of a safetensors file or folder."""

    def __init__(self, path: str | Path):
        """Raises `ModelFileError` if the files are missing or malformed."""
        self._folder = SafetensorsFolder(path)
        self.names = self._folder.names
        self.info = self._folder.info
        self.raw = self._folder.raw
        self.drop = self._folder.drop
        self.close = self._folder.close

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A view of the file, or a converted copy. Raises `UnsupportedModel` if torch lacks the dtype."""
        return _cast(self._folder.torch(name), dtype)


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

    def tensor(self, name: str, dtype: torch.dtype | None = None, index: int | None = None) -> torch.Tensor:
        """A view for plain number types, else decoded weights. Raises `UnsupportedModel` for Q8_1.

        index: return only this matrix of a stack; the others are not read.
        """
        tensor = self.model.tensors[name]
        plain = _PLAIN_GGML.get(tensor.ggml_type)
        if plain is not None:
            whole = self.model.part(name).tensor(name, plain)
            return _cast(whole if index is None else whole[index], dtype)
        shape, data = tensor.shape, self.model.data(name)
        if index is not None:
            shape, data = shape[1:], data[index * shape[1] : (index + 1) * shape[1]]
        out = torch.empty(shape, dtype=dtype or torch.float32)
        _decode(out.view(-1), data.reshape(-1), tensor.ggml_type)
        return out


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
        return self.tensor(name).numpy().view(np.uint8).reshape(-1)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        shape = self._shapes[name]
        key = hashlib.blake2b(f"{self._seed} {name} {shape}".encode(), digest_size=8).digest()
        normal = np.random.Generator(np.random.Philox(int.from_bytes(key, "little")))
        values = torch.from_numpy(normal.standard_normal(shape, dtype=np.float32))
        if len(shape) > 1:
            return _cast(values / shape[-1] ** 0.5, dtype)
        return _cast(0.1 * values + name.endswith("weight"), dtype)

    def drop(self, name: str) -> None:
        """Does nothing: there is no file."""

    def close(self) -> None:
        """Does nothing: there is no file."""


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None else tensor.to(dtype)


def _decode(out: torch.Tensor, data: np.ndarray, ggml_type: GGMLType) -> None:
    """Decodes into a flat tensor of any dtype, in chunks if a conversion is necessary."""
    if out.dtype == torch.float32:
        dequantize_into(out.numpy(), data, ggml_type)
        return
    buffer = np.empty(min(CHUNK, out.numel()), np.float32)
    for start in range(0, out.numel(), CHUNK):
        target = out[start : start + CHUNK]
        chunk = buffer[: target.numel()]
        first, size = ggml_type.row_bytes(start), ggml_type.row_bytes(target.numel())
        dequantize_into(chunk, data[first : first + size], ggml_type)
        target.copy_(torch.from_numpy(chunk))
