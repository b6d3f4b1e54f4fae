"""The angles of the rotary embedding: computed on the host in float64 by functions of our own (`elementary`), one row
per position, kept as float32.

Frequencies: theta^(-2i/d) (arXiv:2104.09864), changed as `RopeScaling` says. YaRN: arXiv:2309.00071; longrope:
arXiv:2402.13753; llama3: the Llama 3.1 model card and its reference code; linear: arXiv:2306.15595.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvasir.layers.elementary import log, power, sin_cos
from kvasir.ops.rope import rope

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
_FIRST_ROWS = 1024


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of the rotary embedding are changed. A kind leaves what it has no use for as it is.

    kind:
      default   unchanged
      linear    every frequency divided by `factor`
      dynamic   NTK: unchanged up to the trained length, which is where we end the context
      llama3    divided by `factor` where the wavelength is beyond original_max_position / low_freq_factor,
                unchanged where it is below original_max_position / high_freq_factor, a ramp between
      yarn      divided by `factor` or not, by a ramp between the dimensions that beta_fast and beta_slow name
                (its borders rounded outwards when `truncate`); cos and sin multiplied by `attention_factor`
      longrope  frequency i divided by factors[i], the short ones; cos and sin multiplied by `attention_factor`.
                A sequence beyond original_max_position would have all its angles, also those before, divided
                by other factors: so that is where we end the context
      factors   frequency i divided by factors[i] (GGUF `rope_freqs.weight`)
    """

    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    factors: tuple[float, ...] = ()

    def context_length(self, max_position: int) -> int:
        """Tokens the model can see, given `max_position_embeddings` (llama3 counts its factor in already)."""
        if self.kind == "linear":
            return int(max_position * self.factor)
        if self.kind == "yarn":
            return max(max_position, int(self.original_max_position * self.factor))
        if self.kind == "longrope":
            return min(max_position, self.original_max_position)
        return max_position


def frequencies(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians per position, float64 [dim / 2]."""
    plain = np.array([power(theta, -i, dim) for i in range(0, dim, 2)])
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, dim, theta, scaling)
    if scaling.kind in ("longrope", "factors"):
        return plain / np.asarray(scaling.factors)
    return plain


def _llama3(plain: np.ndarray, s: RopeScaling) -> np.ndarray:
    """A share of 1 keeps a frequency, 0 divides it: 1 for short waves, 0 for long ones, linear in 1 / length
    between."""
    waves_in_original = s.original_max_position * plain / (2 * math.pi)
    share = (waves_in_original - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return (1 - share) * plain / s.factor + share * plain


def _yarn(plain: np.ndarray, dim: int, theta: float, s: RopeScaling) -> np.ndarray:
    def dimension_that_turns(times: float) -> float:
        """The (fractional) dimension whose angle goes round so often within the original length."""
        return dim * log(s.original_max_position / (times * 2 * math.pi)) / (2 * max(log(theta), 1e-9))

    low, high = dimension_that_turns(s.beta_fast), dimension_that_turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain / s.factor * ramp + plain * (1 - ramp)


class Rope:
    """The table of one rotary embedding, shared by the layers that use it. It grows with the positions asked
    for; a row depends on its position alone.

    dim: dimensions of a head that turn. device: where the rows are needed.
    """

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None = None):
        scaling = scaling or RopeScaling()
        self.frequencies = frequencies(dim, theta, scaling)
        self.factor = scaling.attention_factor if scaling.kind in ("yarn", "longrope") else 1.0
        self._cos = torch.empty(0, dim // 2)
        self._sin = torch.empty(0, dim // 2)

    def rows(self, positions_T: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, dim / 2], of int64 positions below `end`."""
        if end > self._cos.shape[0] or self._cos.device != positions_T.device:
            self._grow(end, positions_T.device)
        return self._cos[positions_T], self._sin[positions_T]

    @property
    def half(self) -> int:
        """Pairs of dimensions that turn."""
        return len(self.frequencies)

    def table(self, end: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the positions below `end`, float32 [end, dim / 2]."""
        angles = np.arange(end, dtype=np.float64)[:, None] * self.frequencies
        sin, cos = sin_cos(angles)
        return (cos * self.factor).astype(np.float32), (sin * self.factor).astype(np.float32)

    def _grow(self, end: int, device: torch.device) -> None:
        cos, sin = self.table(max(_FIRST_ROWS, 1 << (end - 1).bit_length()))
        self._cos, self._sin = torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device)

    def __call__(self, x_THd: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rope(x_THd, *angles)
