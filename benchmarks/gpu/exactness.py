"""What it costs that tiles and segments are functions of the matrix alone: our products against the best of free tiles
and segments for each number of rows, and against cuBLAS in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.measure import Place, Run
from benchmarks.gpu.models import config_of, random_matrix
from kvasir.graph.forward import WHOLE_FROM
from kvasir.ops.compiling import compile_all
from kvasir.ops.launch import recording
from kvasir.ops.linear.triton import LAYOUTS, DeviceMatrix, Tiles, choose_segments, product, unit, whole_product

MODULE = "kvasir.ops.linear.triton.tiles"
SEGMENTS = (1, 2, 4, 8)
MOST_COPIES = 64


def shapes_of(shape: str) -> dict[str, tuple[int, int, bool]]:
    """(rows, columns, whether the consumer joins segments) of a layer's matrices."""
    c = config_of(shape)
    heads, width, inner = c["num_attention_heads"], c["hidden_size"], c["intermediate_size"]
    q, kv = heads * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    return {
        "qkv": (q + 2 * kv, width, True),
        "out": (width, q, True),
        "up": (inner, width, False),
        "down": (width, inner, True),
    }


def candidates(format: str, count: int, full: bool, capability: int) -> list[Tiles]:
    """Free tiles for `count` rows. Larger ones of Q4_K do not fit into the tensor memory of sm_100: they would trap."""
    steps = (128,) if format in LAYOUTS else (64, 128) if full else (64,)
    rows = [size for size in (16, 32, 64, 128) if size <= max(16, 2 * count)][-3 if full else -2 :]
    outputs = ((32, 4), (64, 4), (128, 4), (128, 8)) if full else ((64, 4), (128, 8))
    stages = (2, 3, 4) if full else (3,)
    found = [Tiles(n, t, k, warps, s) for n, warps in outputs for t in rows for k in steps for s in stages]
    small = format == "Q4_K" and capability >= 100
    return [tile for tile in found if not small or (tile.block_n <= 64 and tile.block_t <= 32)]


def exactness(place: Place, shape: str, format: str, name: str, count: int, full: bool) -> dict[str, Any]:
    """Times of one product with `count` input rows, each on weights that are not in a cache. cost: of the constant
    tiles and segments, relative to the best free ones."""
    rows, cols, reduces = shapes_of(shape)[name]
    segments = choose_segments(rows, cols, unit(format), reduces)
    first = random_matrix(rows, cols, segments, format, place.device)
    copies = 2 if not place.is_cuda else min(MOST_COPIES, max(4, 4 * place.l2_bytes() // first.nbytes))
    weights = [first, *(random_matrix(rows, cols, segments, format, place.device) for _ in range(copies - 1))]
    x = torch.randn(count, cols, dtype=torch.bfloat16, device=place.device)
    parts = torch.empty(max(SEGMENTS), count, rows, device=place.device)
    whole = count >= WHOLE_FROM and segments > 1

    def ours() -> None:
        for weight in weights:
            whole_product(x, weight, parts[0]) if whole else product(x, weight, parts[:segments])

    def free(parted: list[DeviceMatrix]) -> None:
        for weight in parted:
            product(x, weight, parts[: weight.segments])

    def cublas() -> None:
        for matrix in floats:
            torch.matmul(x, matrix.T, out=out)

    def milliseconds(run: Run) -> float:
        return place.seconds(place.record()(run))["median"] / copies

    options = [s for s in (SEGMENTS if count < WHOLE_FROM else SEGMENTS[:2]) if cols % (s * max(unit(format), 64)) == 0]
    tried: dict[str, float] = {}
    failed: list[str] = []
    choices = candidates(format, count, full, place.capability())
    with recording(dry=True) as launches:
        ours()
        for tile in choices:
            with patch(MODULE, lambda *a, tile=tile, **k: tile):
                free([first])
    compile_all(launches)
    own = milliseconds(ours)
    for tile in choices:
        for s in options:
            parted = [replace(weight, segments=s) for weight in weights]
            label = f"{'x'.join(map(str, tile))} in {s}"
            try:
                with patch(MODULE, lambda *a, tile=tile, **k: tile):
                    tried[label] = milliseconds(lambda parted=parted: free(parted))
            except Exception as error:  # a tile may take more memory than the device has
                if place.is_cuda:
                    torch.cuda.synchronize()  # a fault of the device ends the run
                failed.append(f"{label}: {type(error).__name__}")
    floats = [torch.randn(rows, cols, dtype=torch.bfloat16, device=place.device) for _ in range(copies)]
    out = torch.empty(count, rows, dtype=torch.bfloat16, device=place.device)
    if place.is_cuda:
        dense = milliseconds(cublas)
    else:
        dense = place.seconds(cublas)["median"] / copies
    best = min(tried, key=lambda label: tried[label]) if tried else ""
    return {
        **{"matrix": name, "rows": rows, "cols": cols, "count": count, "segments": segments, "nbytes": first.nbytes},
        **{"ours_ms": own, "best_ms": tried.get(best), "best": best, "cublas_bf16_ms": dense},
        "cost": own / tried[best] - 1 if tried else None,
        "ours_to_cublas": own / dense,
        **{"tried": len(tried), "failed": failed},
    }
