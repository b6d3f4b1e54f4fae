"""The tensors of a GGUF file under the names and in the orientation of a checkpoint (`kvasir.models.gguf_names`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any, Protocol

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.models import gguf_gemma_names as gemmas
from kvasir.models.config import MAX_EXPERTS
from kvasir.models.gguf_names import family_of, halves_from_pairs, hf_name, parts_of

_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
_FUSED = "ffn_gate_up_exps"  # of which each matrix has the gate's rows, then those of up
# Stored without the dimension of size 1, or with more of them.
_CONVOLUTIONS = ("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv")
_RATES = "ssm_a"  # stored as -exp(A_log)


class TensorSource(Protocol):
    """The methods of `kvasir.weights.source.GGUFSource` that this module uses: those of a `WeightSource`, and `tensor`
    with the index of a matrix in a stack."""

    def names(self) -> Iterable[str]:
        """The names of all tensors."""
        ...

    def info(self, name: str) -> Any:
        """The entry of a tensor: its type and shape."""
        ...

    def raw(self, name: str) -> np.ndarray:
        """The rows' bytes, uint8 [rows, bytes per row]."""
        ...

    def array(self, name: str, index: int | None = None) -> np.ndarray:
        """The tensor in its own type; with `index`, one matrix of a stack of experts."""
        ...

    def drop(self, name: str) -> None:
        """Releases the pages of a tensor that is no longer needed."""
        ...

    def close(self) -> None:
        """Closes the file."""
        ...


class HFView:
    """A GGUF `WeightSource` under the checkpoint's names and in its orientation, as if it were read from
    safetensors."""

    def __init__(self, source: TensorSource, config: Mapping[str, Any], architecture: str):
        """config: the result of `hf_config_from_gguf` for the same file."""
        self._source = source
        self._family = family_of(architecture)
        self._heads = {
            "attn_q": config.get("num_attention_heads", 1),
            "attn_k": config.get("num_key_value_heads", 1),
            "fused": config.get("num_kv_heads") or config.get("num_attention_heads", 1),
        }
        self._head_dim = int(config.get("head_dim") or 1)
        self._stored: dict[str, tuple[str, int | None]] = {}  # name in the file, and index in a stack of experts
        self._halves: dict[str, int] = {}  # of a matrix of gate and up: 0 or 1
        for name in source.names():
            hf = hf_name(architecture, name)
            if hf is not None:
                hf = self._drafting(hf, int(config.get("num_hidden_layers") or 0))
                parts, shape = self._family.stacks.get(parts_of(name)[1], ""), source.info(name).shape
                if parts and (len(shape) < 2 or shape[0] != len(parts)):
                    raise ModelFileError(f"{name} has shape {list(shape)}", f"expected a stack of {len(parts)} vectors")
                places = enumerate(parts) if parts else ((i, i) for i in _places(name, shape))
                found = {hf.replace("*", str(part)): (name, i) for i, part in places}
                self._stored |= self._parted(found) if parts_of(name)[1] == _FUSED else found
        self.close = source.close

    def _parted(self, found: dict[str, tuple[str, int | None]]) -> dict[str, tuple[str, int | None]]:
        """Matrices of gate and up as two each."""
        parted = {}
        for half, part in enumerate(("gate_proj", "up_proj")):
            names = {name.replace("gate_up_proj", part): place for name, place in found.items()}
            self._halves |= dict.fromkeys(names, half)
            parted |= names
        return parted

    def _drafting(self, name: str, layers: int) -> str:
        """The checkpoint's name of a tensor of a layer for multi-token prediction, of which the file's name continues
        those of the model's own layers; any other name as it is."""
        names, found = self._family.drafting, re.match(rf"{re.escape(self._family.layers)}\.(\d+)\.(.*)", name)
        if not names or found is None or (number := int(found[1]) - layers) < 0:
            return name
        module, _, kind = found[2].rpartition(".")
        if module in names:
            return f"{names[module].format(number)}.{kind}"
        return f"{names[''].format(number)}.{found[2]}"

    def names(self) -> Iterable[str]:
        """The checkpoint's names of all tensors that hold weights."""
        return self._stored.keys()

    def info(self, name: str) -> Any:
        """The file's entry with the checkpoint's name and shape."""
        stored, place = self._stored[name]
        info = self._source.info(stored)
        if place is not None:
            parts = 2 if name in self._halves else 1
            shape = (info.shape[1] // parts, *info.shape[2:])
            return replace(info, name=name, shape=shape, nbytes=info.nbytes // info.shape[0] // parts)
        shape = info.shape[::-1] if self._is_transposed(name) else info.shape
        if parts_of(stored)[1] in self._family.flat:
            shape = (prod(shape),)
        if self._is_one_row(name):
            shape = (1, *shape[-1:])
        if parts_of(stored)[1] in self._family.flattened and len(shape) == 3:
            shape = (shape[0] * shape[1], shape[2])
        if parts_of(stored)[1] in _CONVOLUTIONS and len(shape) > 1:
            shape = (prod(shape[:-1]), 1, shape[-1])
        if parts_of(stored)[1] in self._family.headed and prod(shape) % self._head_dim == 0:
            shape = (prod(shape) // self._head_dim, self._head_dim)
        if parts_of(stored)[1] in self._family.wrapped:
            shape = (1, 1, prod(shape), 1)
        return replace(info, name=name, shape=shape)

    def array(self, name: str) -> np.ndarray:
        """As `WeightSource.array`: a view where the file is only transposed, a copy where another change of the
        converter is undone."""
        stored, place = self._stored[name]
        if place is not None:
            return self._half(name, self._source.array(stored, place))
        array = self._source.array(stored)
        if self._is_transposed(name):
            return array.T
        _, module, kind = parts_of(stored)
        if module in self._family.raised and kind == "weight":
            return array.astype(np.float32) - np.float32(1)
        if self._is_one_row(name):
            return array.reshape(1, -1)
        if module in self._family.headed:
            return array.reshape(-1, self._head_dim)
        if module in self._family.flattened:
            return array.reshape(-1, array.shape[-1])
        if module in _CONVOLUTIONS and kind == "weight":
            return array.reshape(-1, 1, array.shape[-1])
        if module == _RATES:
            with np.errstate(divide="ignore", invalid="ignore"):  # NaN in a bad file stays in its own answers
                rates = np.log(-array.astype(np.float64)).astype(np.float32)
            rates = rates.reshape(1, 1, -1, 1) if module in self._family.wrapped else rates
            return rates.reshape(-1) if module in self._family.flat else rates
        if module in self._family.flat:
            return array.reshape(-1)
        order = self._row_order(name, array.shape[0] if array.ndim else 1)
        return array if order is None else array[order]

    def raw(self, name: str) -> np.ndarray:
        """The rows' bytes, uint8 [rows, bytes per row], in the checkpoint's row order.

        A transposed weight stays as in the file: one row per output, as kernels expect.
        """
        stored, place = self._stored[name]
        data = self._source.raw(stored)
        if place is not None:
            shape = self._source.info(stored).shape
            rows = shape[1] if len(shape) == 3 else 1
            data = self._half(name, data[place * rows : (place + 1) * rows])
        if self._is_one_row(name):
            return data.reshape(1, -1)
        order = self._row_order(name, data.shape[0])
        return data if order is None else data[order]

    def place(self, name: str) -> tuple[str, int | None]:
        """The file's name of a tensor, and its index in a stack of experts."""
        return self._stored[name]

    def outputs(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows for each output of a matrix in the file's order, such as an adapter's b, in the checkpoint's."""
        rows = self._half(name, rows)
        order = self._row_order(name, len(rows))
        return rows if order is None else rows[order]

    def drop(self, name: str) -> None:
        """As `WeightSource.drop`; a stack of experts is dropped with its last matrix."""
        stored, place = self._stored[name]
        last = place is None or place == self._source.info(stored).shape[0] - 1
        if last and self._halves.get(name, 1) == 1:
            self._source.drop(stored)

    def _half(self, name: str, rows: np.ndarray) -> np.ndarray:
        """The tensor's rows of a matrix of gate and up."""
        if name not in self._halves:
            return rows
        size = len(rows) // 2
        return rows[self._halves[name] * size :][:size]

    def _is_transposed(self, name: str) -> bool:
        _, module, kind = parts_of(self._stored[name][0])
        return kind == "weight" and module in self._family.transposed

    def _is_one_row(self, name: str) -> bool:
        _, module, _ = parts_of(self._stored[name][0])
        return module in (*self._family.squeezed, *self._family.nested)

    def _row_order(self, name: str, num_rows: int) -> np.ndarray | None:
        _, module, _ = parts_of(self._stored[name][0])
        heads = self._heads.get(module, self._heads["attn_q"])
        if module in self._family.parted:
            groups = self._heads["fused"]
            if num_rows % (heads + 2 * groups) or heads % groups:
                raise ModelFileError(f"{name} has {num_rows} rows", f"expected q, k and v of {heads} heads")
            dim = num_rows // (heads + 2 * groups)
            parts = np.split(np.arange(num_rows), [heads * dim, (heads + groups) * dim])
            return np.concatenate([part.reshape(groups, -1) for part in parts], axis=1).reshape(num_rows)
        if module not in self._family.paired_rows:
            return None
        if num_rows % (2 * heads):
            raise ModelFileError(f"{name} has {num_rows} rows, which {heads} heads of even width cannot share")
        return halves_from_pairs(num_rows, heads)


def _places(name: str, shape: tuple[int, ...]) -> Iterable[int | None]:
    """The indices in a stack of experts' matrices; (None,) for a tensor that is not a stack. Raises ModelFileError for
    a bad shape."""
    _, module, kind = parts_of(name)
    if module not in (*_EXPERTS, *gemmas.STACKS) or kind == "scale":
        return (None,)
    if len(shape) != (2 if name.endswith(".bias") else 3) or shape[0] > MAX_EXPERTS:
        raise ModelFileError(f"{name} has shape {list(shape)}", f"expected a stack of at most {MAX_EXPERTS} matrices")
    if module == _FUSED and shape[1] % 2:
        raise ModelFileError(f"{name} has shape {list(shape)}", "expected as many rows of gates as of ups")
    return range(shape[0])
