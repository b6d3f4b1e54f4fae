"""A view of a checkpoint in which some tensors are computed from others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from kvasir.errors import KvasirError, ModelFileError
from kvasir.quant.gguf_types import GGMLType, dequantize
from kvasir.quant.inputs import Inputs
from kvasir.weights.mapped import TensorInfo
from kvasir.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Decoded:
    """A tensor that is computed. dtype: of the result, as in `TensorInfo`, or the name of a GGML type, of which
    `compute` returns the rows' bytes. parts: the tensors it is computed from. values: of a GGML type, the values as the
    format's own package rounds them; by default those of the type. inputs: of the matrix that the bytes are of; with an
    order, `values` are in the model's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...]
    compute: Callable[[], np.ndarray]
    values: Callable[[], np.ndarray] | None = None
    inputs: Inputs | None = None

    @property
    def is_packed(self) -> bool:
        return self.dtype in GGMLType.__members__ and self.dtype not in ("F32", "F16", "BF16")


class DecodedView:
    """A `WeightSource` with decoded tensors in place of their parts. method: the name of the format. dropped: a pattern
    of tensors that have no place in the model, such as the scales of its activations. scheme: a message about parts of
    the file's scheme that do not concern weights."""

    def __init__(
        self, source: WeightSource, decoded: Iterable[Decoded], method: str, dropped: str = "", scheme: str = ""
    ):
        self._source, self._method, self._scheme = source, method, scheme
        self._decoded = {tensor.name: tensor for tensor in decoded}
        parts = {part for tensor in self._decoded.values() for part in tensor.parts}
        drop = re.compile(dropped or "(?!)")
        self._plain = [name for name in source.names() if name not in parts and not drop.fullmatch(name)]
        self.close = source.close

    @property
    def note(self) -> str:
        """A message for the user: how many matrices are decoded, by their dtype here."""
        found = Counter(tensor.dtype for tensor in self._decoded.values())
        kinds = ", ".join(f"{number} as {kind}" for kind, number in sorted(found.items()))
        end = f"; {self._scheme}" if self._scheme else ""
        return f"{found.total()} matrices quantized by {self._method}: {kinds or 'none'}{end}"

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        return [*self._plain, *self._decoded]

    def info(self, name: str) -> TensorInfo:
        """As `WeightSource.info`; the bytes are those of the parts."""
        tensor = self._decoded.get(name)
        if tensor is None:
            return self._source.info(name)
        parts = [self._source.info(part) for part in tensor.parts]
        size = sum(part.nbytes for part in parts)
        return TensorInfo(name, tensor.shape, tensor.dtype, size, parts[0].file, tensor.inputs)

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`."""
        tensor = self._decoded.get(name)
        if tensor is None:
            return self._source.array(name)
        if tensor.is_packed and tensor.values is None:
            return dequantize(_computed(tensor, tensor.compute), GGMLType[tensor.dtype], tensor.shape)
        return _computed(tensor, tensor.values or tensor.compute)

    def raw(self, name: str) -> np.ndarray:
        """As `WeightSource.raw`."""
        tensor = self._decoded.get(name)
        if tensor is None:
            return self._source.raw(name)
        return np.ascontiguousarray(_computed(tensor, tensor.compute)).view(np.uint8)

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`, of all parts."""
        tensor = self._decoded.get(name)
        for part in tensor.parts if tensor else (name,):
            self._source.drop(part)


def _computed(tensor: Decoded, compute: Callable[[], np.ndarray]) -> np.ndarray:
    """Readers check what they rely on for the shape of a matrix; NumPy refuses parts that do not fit that."""
    try:
        return compute()
    except KvasirError:
        raise
    except (ValueError, IndexError, TypeError) as error:
        raise ModelFileError(
            f"{tensor.name}: its parts ({', '.join(tensor.parts)}) do not fit together: {error}", "is the file damaged?"
        ) from error


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one quantized matrix in a file, by their last names."""

    source: WeightSource
    stem: str
    present: frozenset[str]

    def __contains__(self, kind: str) -> bool:
        return f"{self.stem}.{kind}" in self.present

    def info(self, kind: str) -> TensorInfo:
        """Of a tensor. Raises ModelFileError if it is missing."""
        if kind not in self:
            self.refuse(f"there is no tensor {kind}", "is the download complete?")
        return self.source.info(f"{self.stem}.{kind}")

    def array(self, kind: str, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """A tensor; with `shape`, checked against it."""
        self.info(kind)
        found = self.source.array(f"{self.stem}.{kind}")
        if shape is not None and found.shape != shape:
            self.refuse(f"{kind} has shape {list(found.shape)}", f"expected {list(shape)}")
        return found

    def refuse(self, problem: str, hint: str) -> NoReturn:
        """Raises ModelFileError that names the matrix."""
        raise ModelFileError(f"{self.stem}: {problem}", hint)


def stems(source: WeightSource, kind: str) -> Iterable[Stored]:
    """The matrices that have a tensor `kind`."""
    names = frozenset(source.names())
    for name in source.names():
        stem, _, last = name.rpartition(".")
        if last == kind:
            yield Stored(source, stem, names)
