"""Normalisation layers over the last dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvasir.layers.module import Module
from kvasir.layers.places import Place
from kvasir.ops.norm import layer_norm, rms_norm

if TYPE_CHECKING:
    from torch import Tensor


class RMSNorm(Module):
    """x: float32 [T, ..., width]. Its changes are copies of it, with the weights of adapters."""

    adaptable = True

    def __init__(self, width: int, eps: float):
        self.width, self.eps = width, eps
        self.weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        out = self.normalised(x)
        for use, other in self.changes["weight"].in_effect() if self.changes else ():
            out[use.rows_n] = other.normalised(x[use.rows_n])
        return out

    def normalised(self, x: Tensor) -> Tensor:
        """By the model's own weights."""
        return rms_norm(x, self.weight, self.eps)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        kept = place.exact(array)
        setattr(self, name, kept)
        return kept


class OffsetRMSNorm(RMSNorm):
    """An RMSNorm whose checkpoint stores weight - 1; the 1 is added in float32."""

    def put(self, name: str, array: Any, place: Place) -> Any:
        return super().put(name, place.exact(array) + 1.0, place)


class LayerNorm(RMSNorm):
    """x: float32 [..., width]; has a bias."""

    bias: Tensor

    def normalised(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,), "bias": (self.width,)}


class OffsetLayerNorm(LayerNorm):
    """A LayerNorm whose checkpoint stores weight - 1; the 1 is added in float32."""

    def put(self, name: str, array: Any, place: Place) -> Any:
        return super().put(name, place.exact(array) + 1.0 if name == "weight" else array, place)


class PlainLayerNorm(LayerNorm):
    """A LayerNorm without a bias."""

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        self.bias = place.exact(array) * 0.0
        return super().put(name, array, place)


class BareRMSNorm(RMSNorm):
    """An RMSNorm without weights."""

    def normalised(self, x: Tensor) -> Tensor:
        return rms_norm(x, None, self.eps)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {}


class BareLayerNorm(RMSNorm):
    """A LayerNorm without weights."""

    def normalised(self, x: Tensor) -> Tensor:
        return layer_norm(x, None, None, self.eps)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {}


class HeadsLayerNorm(PlainLayerNorm):
    """A LayerNorm without a bias over each head, with weights of its own for each. x: float32 [T, heads, width]. order:
    of the dimensions that the checkpoint has in another order."""

    def __init__(self, heads: int, width: int, eps: float, order: tuple[int, ...]):
        super().__init__(width, eps)
        self.heads, self.order = heads, list(order)

    def expects(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.heads, self.width)}

    def put(self, name: str, array: Any, place: Place) -> Any:
        return super().put(name, array[:, self.order], place)
