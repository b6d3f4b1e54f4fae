"""Parts of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvasir.ops.registry import op_with

if TYPE_CHECKING:
    from torch import Tensor


@op_with(lambda x_TN, first, last: ((last - first,),))
def take_columns(x_TN: Tensor, first: int, last: int) -> Tensor:
    """The columns [first, last) of rows, float32 [T, last - first]."""
    ...
