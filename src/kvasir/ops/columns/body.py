"""The torch body of the parts of rows."""

from __future__ import annotations

from torch import Tensor


def take_columns(x_TN: Tensor, first: int, last: int) -> Tensor:
    return x_TN[:, first:last]
