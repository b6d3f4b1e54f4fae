"""gpt-oss's experts in MXFP4: `gate_up_proj_blocks` [E, 2 I, H / 32, 16] and `down_proj_blocks` [E, H, I / 32, 16] of
pairs of FP4, with the rows of gate and up in turns, and `.._scales` [E, rows, groups] of E8M0. Their bytes become
GGML's MXFP4. Source: OCP Microscaling Formats 1.0; the model's own checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from kvasir.errors import ModelFileError
from kvasir.weights.published.codes import nibbles, to_mxfp4_blocks
from kvasir.weights.published.view import Decoded
from kvasir.weights.source import WeightSource

_BLOCKS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_blocks")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def read(source: WeightSource) -> Iterator[Decoded]:
    """The matrices of all experts, one by one."""
    for name in source.names():
        if match := _BLOCKS.fullmatch(name):
            yield from _stack(source, name, match[1], match[2])


def _stack(source: WeightSource, blocks: str, experts: str, kind: str) -> Iterator[Decoded]:
    scales, shape = blocks.replace("_blocks", "_scales"), source.info(blocks).shape
    if len(shape) != 4 or shape[3] != 16 or not all(shape) or shape[1] % 2 or source.info(blocks).dtype != "U8":
        raise ModelFileError(f"tensor {blocks} has shape {list(shape)}", "expected [experts, rows, groups, 16] of U8")
    if scales not in source.names() or tuple(source.info(scales).shape) != shape[:3]:
        raise ModelFileError(f"tensor {scales} is missing, or does not have shape {list(shape[:3])}")
    parts = _PARTS[kind]
    for expert in range(shape[0]):
        for index, part in enumerate(parts):
            yield Decoded(
                f"{experts}.{expert}.{part}.weight",
                (shape[1] // len(parts), shape[2] * 32),
                "MXFP4",
                (blocks, scales),
                lambda expert=expert, index=index: _rows(source, blocks, scales, expert, index, len(parts)),
            )


def _rows(source: WeightSource, blocks: str, scales: str, expert: int, index: int, count: int) -> np.ndarray:
    data = source.array(blocks)[expert, index::count]
    return to_mxfp4_blocks(nibbles(data.reshape(len(data), -1)), source.array(scales)[expert, index::count])
