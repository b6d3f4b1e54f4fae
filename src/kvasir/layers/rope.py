"""The angles of the rotary embedding: computed on the host in float64 with reproducible functions (`elementary`), one
row per position, stored as float32.

Frequencies: theta^(-2i/d) (arXiv:2104.09864), modified by `RopeScaling`. YaRN: arXiv:2309.00071; longrope:
arXiv:2402.13753; llama3: the Llama 3.1 model card and its reference code; linear: arXiv:2306.15595.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvasir.layers.elementary import log, power, sin_cos
from kvasir.layers.pages import paged
from kvasir.ops.rope import rope

if TYPE_CHECKING:
    from torch import Tensor

STILL = "still"
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")
MAX_POSITIONS = 1 << 26
PIECE = 256  # positions per computation of angles: about two milliseconds


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of the rotary embedding are scaled. A kind ignores the fields that it does not use.

    kind:
      default   unchanged
      linear    every frequency divided by `factor`
      dynamic   NTK: unchanged up to the trained length, where we end the context
      llama3    divided by `factor` where the wavelength is above original_max_position / low_freq_factor,
                unchanged where it is below original_max_position / high_freq_factor, interpolated in between
      yarn      divided by `factor` or unchanged, with a ramp between the dimensions given by beta_fast and
                beta_slow (rounded outwards if `truncate`); cos and sin multiplied by `attention_factor`
      longrope  frequency i divided by factors[i], the short factors, or by long_factors[i] if the served context
                exceeds original_max_position, however long a sequence is: keys and values of one position are then the
                same in all sequences. cos and sin multiplied by `attention_factor`, or by `long_attention_factor` if
                it is not 0. Without long_factors the context cannot exceed original_max_position
      factors   frequency i divided by factors[i] (GGUF `rope_freqs.weight`)
      still     no rotation
      proportional   the first `share` of the frequencies divided by `factor`, the others 0 (Gemma 4)
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
    share: float = 1.0
    long_factors: tuple[float, ...] = ()
    long_attention_factor: float = 0.0

    def served(self, length: int) -> RopeScaling:
        """The scaling where contexts of this many tokens are served: for LongRoPE, with the factors to use."""
        if not self.long_factors or length <= self.original_max_position:
            return replace(self, long_factors=(), long_attention_factor=0.0)
        attention = self.long_attention_factor or self.attention_factor
        return replace(
            self, factors=self.long_factors, attention_factor=attention, long_factors=(), long_attention_factor=0.0
        )

    @property
    def short_until(self) -> int:
        """The longest served context for the short factors; 0 if there is only one set of factors."""
        return self.original_max_position if self.long_factors else 0

    def context_length(self, max_position: int) -> int:
        """Context length of the model in tokens, given `max_position_embeddings` (for llama3 it already includes the
        factor)."""
        if self.kind == "linear":
            return int(max_position * self.factor)
        if self.kind == "yarn":
            return max(max_position, int(self.original_max_position * self.factor))
        return max_position


def frequencies(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians per position, float64 [dim / 2]."""
    if scaling.kind == STILL:
        return np.zeros(dim // 2)
    plain = np.array([power(theta, -i, dim) for i in range(0, dim, 2)])
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, dim, theta, scaling)
    if scaling.kind in ("longrope", "factors"):
        return plain / np.asarray(scaling.factors)
    if scaling.kind == "proportional":
        plain[int(scaling.share * dim // 2) :] = 0.0
        return plain / scaling.factor
    return plain


def _llama3(plain: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Blends the two: a share of 1 keeps a frequency, 0 divides it. 1 for short wavelengths, 0 for long ones, linear in
    1 / wavelength in between."""
    waves_in_original = s.original_max_position * plain / (2 * math.pi)
    if s.high_freq_factor == s.low_freq_factor:
        share = (waves_in_original >= s.low_freq_factor).astype(np.float64)
    else:
        share = (waves_in_original - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
    share = np.clip(share, 0.0, 1.0)
    return (1 - share) * plain / s.factor + share * plain


def _yarn(plain: np.ndarray, dim: int, theta: float, s: RopeScaling) -> np.ndarray:
    def dimension_that_turns(times: float) -> float:
        """The (fractional) dimension whose angle makes `times` rotations within the original length."""
        return dim * log(s.original_max_position / (times * 2 * math.pi)) / (2 * max(log(theta), 1e-9))

    low, high = dimension_that_turns(s.beta_fast), dimension_that_turns(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
    return plain / s.factor * ramp + plain * (1 - ramp)


class Rope:
    """A rotary embedding, shared by the layers that use it. A row of angles depends only on its position.

    dim: number of rotated dimensions of a head. growth: (beta, length): vectors at position p also grow by 1 + beta
    log(1 + floor(p / length)), as the queries of Ministral 3 do (arXiv:2501.19399); all dimensions must rotate. A third
    number is added to p. Llama 4 has it in layers without rotation, which have the kind "still".
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        scaling: RopeScaling | None = None,
        growth: tuple[float, int] | tuple[float, int, int] | None = None,
    ):
        self.dim, self.theta, self.scaling, self.growth = dim, theta, scaling or RopeScaling(), growth
        self.tensors: Any = None  # the eager executor's tables (rope_tensors)
        self.serve(MAX_POSITIONS)

    def serve(self, length: int) -> None:
        """Chooses LongRoPE's factors for contexts of `length` tokens, before any angles are computed. By default, those
        of the longest context."""
        scaling = self.scaling.served(length)
        self.frequencies = frequencies(self.dim, self.theta, scaling)
        self.factor = scaling.attention_factor if scaling.kind in ("yarn", "longrope") else 1.0
        self.tensors = None

    @property
    def half(self) -> int:
        """The number of rotated pairs of dimensions."""
        return len(self.frequencies)

    def table(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of the positions [start, end), float32 [end - start, dim / 2]."""
        angles = np.arange(start, end, dtype=np.float64)[:, None] * self.frequencies
        sin, cos = sin_cos(angles)
        factor = self.factor * self._growth(start, end)
        return (cos * factor).astype(np.float32), (sin * factor).astype(np.float32)

    def _growth(self, start: int, end: int) -> np.ndarray:
        """Of the positions [start, end), float64 [end - start, 1]."""
        if self.growth is None or start == end:
            return np.ones((end - start, 1))
        beta, length, more = self.growth if len(self.growth) == 3 else (*self.growth, 0)
        first, steps = (start + more) // length, (np.arange(start, end) + more) // length
        values = [1 + beta * log(1.0 + step) for step in range(first, steps[-1] + 1)]
        return np.array(values)[steps - first, None]

    def __call__(self, x_THd: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        return rope(x_THd, *angles)


class RopeAhead(Rope):
    """A rotary embedding whose rows are rotated as at the position after their own."""

    def table(self, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """As `Rope.table`, of the positions [start + 1, end + 1)."""
        return super().table(start + 1, end + 1)


def still(dim: int, growth: tuple[float, int]) -> Rope:
    """A rotary embedding of `dim` dimensions that only makes vectors grow, see `Rope`."""
    rope = Rope(dim, 2.0, growth=growth)
    rope.frequencies = np.zeros_like(rope.frequencies)
    return rope


def ropes(model: Any) -> Iterator[Rope]:
    """The distinct rotary embeddings of the model."""
    found = {id(value): value for _, part in model.walk() for value in vars(part).values() if isinstance(value, Rope)}
    yield from found.values()


class Angles:
    """cos and sin of a rotary embedding: float32 [length, dim / 2] each, at a fixed address.

    Memory is reserved at once. Rows are computed in runs of PIECE positions when a step first needs them, so that
    neither loading a model with a long context nor any single step computes the whole table.
    """

    def __init__(self, rope: Rope, length: int):
        self.length = length
        self._rope = rope
        self.cos, self.sin = (paged((length, rope.half), np.float32) for _ in range(2))
        self._there = np.zeros(-(-length // PIECE), bool)
        self.until = 0  # rows below it are computed
        self.fill(0, 1)  # padding rows of a step are at position 0

    @staticmethod
    def num_bytes(rope: Rope, length: int) -> int:
        """Bytes of the tables for `length` positions."""
        return 2 * 4 * rope.half * length

    def fill(self, start: int, end: int) -> list[slice]:
        """Computes the rows [start, end) that are missing; end is at most `length`. Returns the rows that it has
        computed."""
        if end <= self.until:
            return []
        pieces = range(start // PIECE, -(-end // PIECE))
        computed = [self._compute(piece) for piece in pieces if not self._there[piece]]
        missing = np.flatnonzero(~self._there)
        self.until = int(missing[0]) * PIECE if missing.size else self.length
        return computed

    def _compute(self, piece: int) -> slice:
        rows = slice(piece * PIECE, min((piece + 1) * PIECE, self.length))
        self.cos[rows], self.sin[rows] = self._rope.table(rows.start, rows.stop)
        self._there[piece] = True
        return rows
