"""What the device can do: the bandwidth of copies and the rate of cuBLAS's bfloat16 products."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.measure import Place, clocks


def probe(place: Place) -> dict[str, Any]:
    """copy_bytes_per_s counts bytes read and written. Data are random: zeros would take less power."""
    count, size = (1 << 31, 8192) if place.is_cuda else (1 << 20, 128)
    copy, product = _copy(place, count), _product(place, size)
    return {
        "copy_bytes_per_s": 2 * count / (copy["median"] / 1e3),
        "copy_ms": copy,
        "matmul_flops": 2 * size**3 / (product["median"] / 1e3),
        "matmul_ms": product,
        "matmul_size": size,
        "clocks_after": clocks(),
    }


def _copy(place: Place, count: int) -> dict[str, Any]:
    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return place.seconds(copy)


def _product(place: Place, size: int) -> dict[str, Any]:
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    out = torch.empty_like(a)

    def multiply() -> None:
        torch.matmul(a, b, out=out)

    return place.seconds(multiply)
