"""xIELU, an activation function with trained parameters (arXiv:2411.13010)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.layers.elementary import softplus
from kvasir.layers.module import Module
from kvasir.layers.places import Place
from kvasir.layers.vector import on_host
from kvasir.ops.activation import xielu

if TYPE_CHECKING:
    from torch import Tensor

_SHAPES = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
_MOST = 1000.0  # of a parameter


class Xielu(Module):
    """x: float32 [..., width], elementwise. values: alpha_p, alpha_n, beta and eps; () if they are tensors of the
    checkpoint. Raises ModelFileError for a parameter of 1000 or more."""

    def __init__(self, values: tuple[float, ...] = ()):
        self.given = bool(values)
        self.values = dict.fromkeys(_SHAPES, 0.0)
        for name, value in zip(_SHAPES, values, strict=False):
            self._set(name, value)

    def __call__(self, x: Tensor) -> Tensor:
        v = self.values
        return xielu(x, softplus(v["alpha_p"]), v["beta"] + softplus(v["alpha_n"]), v["beta"], v["eps"])

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {} if self.given else dict(_SHAPES)

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array)
        self._set(name, float(np.asarray(on_host(kept), np.float32).reshape(-1)[0]))
        return kept

    def _set(self, name: str, value: float) -> None:
        if not abs(value) < _MOST:
            raise ModelFileError(f"xIELU's {name} is {value}", f"expected a number below {_MOST:g}")
        self.values[name] = value
