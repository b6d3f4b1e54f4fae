"""Where the ranks of a program meet: calls out of C, which no error may pass through."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvasir.parallel import ExpertShare, picked, side_by_side, tree_sum
from kvasir.program import native
from kvasir.program.adapters import Adapters
from kvasir.program.lower import Step

Rows = Callable[[int], np.ndarray]  # the first rows of a buffer, float32 [rows, width]


class Meetings:
    """The calls of one program, on its first thread, which flushes denormals as all kernels do. After an error the rest
    of a step meets nobody. errors: of the step under way."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._kept: list[Any] = []

    def address(self, meet: Callable[[int], None]) -> int:
        """What C calls as `meet(rows)`."""
        errors = self.errors

        def call(_: Any, rows: int) -> None:
            try:
                if not errors:
                    meet(rows)
            except BaseException as error:
                errors.append(error)

        function = native.CALL(call)
        self._kept.append(function)
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        return address

    def of_step(self, step: Step, views: tuple[Rows, ...], tokens: np.ndarray, adapters: Adapters) -> int:
        """The call of a step that is a meeting, of whose buffers these are views: the result, then what it is made of.
        tokens: ids of the rows, int64 [rows or more]."""
        if step.op == "all_reduce":
            _, mesh, parts, *slot = step.inputs
            return self.address(partial(_all_reduce, views, mesh, parts, adapters if slot else None))
        if step.op == "all_gather":
            _, mesh, columns = step.inputs
            return self.address(partial(_all_gather, views, mesh, columns))
        _, _, mesh, table = step.inputs
        return self.address(partial(_pick_rows, views, tokens, mesh, table))

    def of_experts(self, share: ExpertShare, rows_SD: np.ndarray, begins: np.ndarray) -> int:
        return self.address(lambda slots: share.complete(rows_SD[:slots], begins))


def _all_reduce(views: tuple[Rows, ...], mesh: Any, parts: int, adapters: Adapters | None, rows: int) -> None:
    out, x = (view(rows) for view in views)
    out[:] = tree_sum(mesh.meet(x), parts)
    if adapters is not None and len(inner := adapters.inner(rows)):
        inner[:] = tree_sum(mesh.meet(inner), parts)


def _all_gather(views: tuple[Rows, ...], mesh: Any, columns: Any, rows: int) -> None:
    out, x = (view(rows) for view in views)
    out[:] = side_by_side(mesh.meet(x), columns.parts)


def _pick_rows(views: tuple[Rows, ...], tokens: np.ndarray, mesh: Any, table: Any, rows: int) -> None:
    out, x = (view(rows) for view in views)
    out[:] = picked(mesh.meet(x), tokens[:rows], table)
