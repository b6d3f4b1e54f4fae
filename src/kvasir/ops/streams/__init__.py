"""Rows of several streams, of which a block computes one and corrects the others (AltUp, arXiv:2301.13310), and the
cut that makes activations sparse (Gemma 3n). A row of streams is float32 [S * D], stream by stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op

if TYPE_CHECKING:
    from torch import Tensor

# letters: T token rows, S streams, D their width, N = S * D


@op
def predict_streams(x_TN: Tensor, coefs_TSS: Tensor, streams: int) -> Tensor:
    """Each stream j plus the sum over all streams s, in ascending order, of stream s times coefs[j * S + s], float32
    [T, N]. coefs: float32 [T, S * S]."""
    ...


@op
def correct_streams(x_TN: Tensor, computed_TD: Tensor, coefs_TS: Tensor, streams: int, active: int) -> Tensor:
    """Each stream s plus (computed - the active stream) * (coefs[s] + 1), float32 [T, N]. coefs: float32 [T, S]."""
    ...


@op
def add_to_streams(x_TN: Tensor, added_TD: Tensor, streams: int) -> Tensor:
    """`added` plus each stream but the first, which stays as it is, float32 [T, N]."""
    ...


@op
def match_magnitude(x_TD: Tensor, like_TD: Tensor, least: float) -> Tensor:
    """x times the root of the mean square of `like`, divided by that of x, float32 [T, D]; the mean square of x counts
    as at least `least`. Sums as in `rms_norm`."""
    ...


@op
def scale_columns(x_TD: Tensor, factors_D: Tensor) -> Tensor:
    """Each column times a factor of its own. factors: float32 [D]."""
    ...


@op
def gaussian_cut(x_TD: Tensor, deviations: float) -> Tensor:
    """How far the elements of a row exceed its mean plus so many standard deviations; 0 where they do not. Sums as in
    `layer_norm`."""
    ...
