"""The collectives of a program's ranks: native where they share memory, else calls from its step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvasir.ops.graph import CHOSEN
from kvasir.parallel import Cut, Mesh, picked, side_by_side, tree_sum
from kvasir.program.adapters import Adapters
from kvasir.program.lower import Instruction
from kvasir.program.shared import COLUMNS, PICK, SUM, MeetingStruct, SharedRank

Rows = Callable[[int], np.ndarray]  # (rows) -> the first rows of a buffer, float32 [rows, width]


def shared_meeting(instruction: Instruction) -> MeetingStruct | None:
    """The operands of an instruction's collective; None if the ranks do not share memory."""
    mesh = next(value for value in instruction.inputs if isinstance(value, Mesh))
    if not isinstance(mesh, SharedRank):
        return None
    width = instruction.outs[0].width
    if instruction.op == "all_reduce":
        return mesh.meeting(SUM, width, instruction.inputs[2])
    cut: Cut = instruction.inputs[-1]
    if instruction.op == "pick_rows":
        return mesh.meeting(PICK, width, cut.parts, cut)
    return mesh.meeting(COLUMNS, width, cut.parts, cut, lead_only=instruction.domain == CHOSEN)  # only it samples


def meeting(
    instruction: Instruction, views: tuple[Rows, ...], tokens: np.ndarray, adapters: Adapters
) -> Callable[[int], None]:
    """The function that performs the collective of an instruction. views: of its buffers, the result, then the input.
    tokens: token ids of the rows, int64 [rows or more]."""
    if instruction.op == "all_reduce":
        _, mesh, parts, *slot = instruction.inputs
        return partial(_all_reduce, views, mesh, parts, adapters if slot else None)
    if instruction.op == "all_gather":
        _, mesh, columns = instruction.inputs
        return partial(_all_gather, views, mesh, columns)
    _, _, mesh, table = instruction.inputs
    return partial(_pick_rows, views, tokens, mesh, table)


def _all_reduce(views: tuple[Rows, ...], mesh: Any, parts: int, adapters: Adapters | None, rows: int) -> None:
    out, x = (view(rows) for view in views)
    out[:] = tree_sum(mesh.meet(x), parts)
    if adapters is not None and len(inner := adapters.inner()):
        inner[:] = tree_sum(mesh.meet(inner), parts) * adapters.scales()[:, None]


def _all_gather(views: tuple[Rows, ...], mesh: Any, columns: Any, rows: int) -> None:
    out, x = (view(rows) for view in views)
    out[:] = side_by_side(mesh.meet(x), columns.parts)


def _pick_rows(views: tuple[Rows, ...], tokens: np.ndarray, mesh: Any, table: Any, rows: int) -> None:
    out, x = (view(rows) for view in views)
    out[:] = picked(mesh.meet(x), tokens[:rows], table)
