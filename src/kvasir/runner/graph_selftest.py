"""Self-test of the graph executor: whether this device computes batch-invariant bits, compared bit by bit."""

from __future__ import annotations

import numpy as np
import torch

from kvasir.graph.triton import NO_TOKEN
from kvasir.runner.graph_executor import GraphExecutor

_LENGTH, _PIECES = 21, (16, 1, 4)
_WIDE = 129  # tokens of a step that takes the tiles for many rows
Piece = tuple[int, int, int]  # row, start, count


@torch.inference_mode()
def run(executor: GraphExecutor) -> str:
    """Returns "exact" if a few rows through the whole model have the same bits in one chunk, in several chunks next to
    another sequence, and in a step of many rows, else "close"; "untested" if the executor or its cache is too small, or
    where only Triton's interpreter runs.

    Overwrites the first blocks of the cache, which must be free.
    """
    step, cache = executor.forward.step, executor.forward.cache
    blocks = -(-_WIDE // cache.block_size)
    if cache.device.type == "cpu" or len(step.ids) < 4 or step.ids.shape[1] <= _WIDE:
        return "untested"
    if executor.replays.max_tokens < 256 or min(cache.num_blocks) < 2 * blocks + 1:
        return "untested"
    step.ids[:2, :_WIDE] = (
        torch.arange(2 * _WIDE, device=cache.device).view(2, _WIDE) % executor.model.config.vocab_size
    )
    step.ids[1, :_LENGTH] = step.ids[0, :_LENGTH]
    for table in step.tables:
        table[:2, :blocks] = torch.arange(1, 1 + 2 * blocks, device=cache.device).view(2, blocks)
    whole = _hidden(executor, [(0, 0, _LENGTH)], 0)
    start, parts = 0, []
    for count in _PIECES:
        parts.append(_hidden(executor, [(0, 0, 3), (1, start, count)], 1))
        start += count
    wide = _hidden(executor, [(0, 0, _WIDE)], 0)[:_LENGTH]
    for tensor in (step.ids, *step.tables):
        tensor[:2] = 0
    same = all(np.array_equal(_bits(whole), _bits(found)) for found in (np.concatenate(parts), wide))
    return "exact" if same else "close"


def _bits(rows: np.ndarray) -> np.ndarray:
    return rows.view(np.uint32)


def _hidden(executor: GraphExecutor, pieces: list[Piece], wanted: int) -> np.ndarray:
    """The hidden states of the piece with index `wanted`, float32 [count, width]."""
    step, forward = executor.forward.step, executor.forward
    table, first = np.zeros(tuple(step.pieces.shape), np.int32), 0
    table[:, 3] = NO_TOKEN
    firsts = []
    for at, (row, start, count) in enumerate(pieces):
        table[at] = row, start, count, first, 0
        firsts.append(first)
        first += count
    step.pieces.copy_(torch.from_numpy(table))
    executor.replays("rows", first)
    rows = forward.value(forward.hidden, first)
    return rows[firsts[wanted] : firsts[wanted] + pieces[wanted][2]].float().cpu().numpy().copy()
