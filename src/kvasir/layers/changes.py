"""What adapters change in the modules of the eager executor, and the rows in which adapters are in effect.

A module keeps its changes by adapter id. The executor states once for each forward which adapters are in effect in
which rows; all modules of the model read it there. The rows of an adapter are computed apart: each row of a product has
the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from kvasir.ops.linear import linear
from kvasir.ops.linear.low_rank import LowRankTensors, add_low_rank

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

C = TypeVar("C")


class Use(NamedTuple):
    """The rows of a forward in which an adapter is in effect. rows: int64 [n], ascending. scales: float32 [n, 1], of
    the requests."""

    adapter: int
    rows_n: Tensor
    scales_n1: Tensor

    def within(self, rows_m: Tensor) -> Use:
        """Those of the given rows, ascending, as places in `rows_m`."""
        import torch

        places_n = torch.isin(rows_m, self.rows_n).nonzero().flatten()
        return Use(self.adapter, places_n, self.scales_n1[torch.searchsorted(self.rows_n, rows_m[places_n])])


class Uses:
    """The adapters in effect in the forward that is under way: first the first adapter of each row, then the second of
    each, and so on. All modules of a model share one object; it is empty between forwards."""

    def __init__(self) -> None:
        self.now: tuple[Use, ...] = ()

    def set(self, rows: Sequence[Sequence[tuple[int, float]]], device: Any = "cpu") -> None:
        """rows: for each row of the forward, (id, scale) of its adapters in their order."""
        import torch

        found: list[Use] = []
        for level in range(max(map(len, rows), default=0)):
            by_id: dict[int, list[tuple[int, float]]] = {}
            for row, adapters in enumerate(rows):
                if level < len(adapters):
                    by_id.setdefault(adapters[level][0], []).append((row, adapters[level][1]))
            for adapter, mine in sorted(by_id.items()):
                places, scales = zip(*mine, strict=True)
                scales_n1 = torch.tensor(scales, dtype=torch.float32, device=device).unsqueeze(1)
                found.append(Use(adapter, torch.tensor(places, device=device), scales_n1))
        self.now = tuple(found)

    def clear(self) -> None:
        """No adapter is in effect."""
        self.now = ()


class Changes(Generic[C]):
    """The changes of one tensor of a module, or of a module, by adapter id."""

    def __init__(self, uses: Uses):
        self.uses = uses
        self.by_id: dict[int, C] = {}

    def in_effect(self) -> Iterator[tuple[Use, C]]:
        """The changes of the forward that is under way, in their order."""
        return ((use, self.by_id[use.adapter]) for use in self.uses.now if use.adapter in self.by_id)

    def within(self, rows_m: Tensor) -> Iterator[tuple[Use, C]]:
        """As `in_effect`, for some of the rows: `Use.rows_n` are places in `rows_m`."""
        found = ((use.within(rows_m), change) for use, change in self.in_effect())
        return ((use, change) for use, change in found if len(use.rows_n))


@dataclass(frozen=True, slots=True, eq=False)
class MatrixChange:
    """Of a matrix [N, K], all of it as tensors. weight: [S, N, k], replaces it. tokens: ids int64 [n] and [1, n, k],
    the rows that replace those of the ids. bias: float32 [N], replaces the bias. pair: is added."""

    pair: LowRankTensors | None = None
    weight: Any = None
    bias: Any = None
    tokens: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TableChange:
    """Of a table [N, width], as tensors. table: [N, width], replaces it. tokens: ascending ids int64 [n] and float32
    [n, width], the rows that replace those of the ids. pair: of the transposed table, is added; its a is [1, rank, N].
    """

    pair: LowRankTensors | None = None
    table: Any = None
    tokens: tuple[Any, Any] | None = None


Found = Sequence[tuple[Use, MatrixChange]]


def change_product(
    out_TN: Tensor,
    x_TK: Tensor,
    found: Found,
    whole: Callable[[Tensor], Tensor] = lambda inner_TR: inner_TR,
) -> Tensor:
    """The product with the changes that are in effect, without a bias, float32 [T, N]. out: the product of the model's
    own matrix; it is overwritten. x: float32 [T, K]. whole: as in `add_low_rank`."""
    for (_, rows_n, _), change in found:
        if change.weight is not None:
            out_TN[rows_n] = linear(x_TK[rows_n], change.weight)
        if change.tokens is not None:
            ids_m, weight_1mK = change.tokens
            out_TN[rows_n.unsqueeze(1), ids_m] = linear(x_TK[rows_n], weight_1mK)
    for (_, rows_n, scales_n1), change in found:
        if change.pair is not None:
            out_TN[rows_n] = add_low_rank(out_TN[rows_n], x_TK[rows_n], scales_n1, change.pair, whole)
    return out_TN


def add_bias(out_TN: Tensor, bias_N: Tensor, found: Found) -> Tensor:
    """out + bias, or the bias that replaces it."""
    with_bias_TN = out_TN + bias_N
    for (_, rows_n, _), change in found:
        if change.bias is not None:
            with_bias_TN[rows_n] = out_TN[rows_n] + change.bias
    return with_bias_TN


def change_lookup(rows_TD: Tensor, ids_T: Tensor, found: Sequence[tuple[Use, TableChange]]) -> Tensor:
    """The looked-up rows with the changes that are in effect, float32 [T, width]. rows: of the model's own table; they
    are overwritten."""
    import torch

    for (_, rows_n, _), change in found:
        if change.table is not None:
            rows_TD[rows_n] = change.table[ids_T[rows_n]].float()
        if change.tokens is not None:
            ids_m, replaced_mD = change.tokens
            places_n = torch.searchsorted(ids_m, ids_T[rows_n]).clamp(max=len(ids_m) - 1)
            hit_n1 = (ids_m[places_n] == ids_T[rows_n]).unsqueeze(1)
            rows_TD[rows_n] = replaced_mD[places_n].where(hit_n1, rows_TD[rows_n])
    for (_, rows_n, scales_n1), change in found:
        if change.pair is not None:
            inner_nR = change.pair.a[0].T[ids_T[rows_n]]
            rows_TD[rows_n] = change.pair.add(rows_TD[rows_n], inner_nR, scales_n1)
    return rows_TD
