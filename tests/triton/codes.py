"""Codes of keys and values and their scales, as torch makes them."""

from __future__ import annotations

import torch

LIMITS = {torch.int8: 127.0, torch.uint8: 448.0}


def quantized(x: torch.Tensor, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of rows of float32 numbers [..., d] and their scales [...]; code: int8, or uint8 for e4m3fn."""
    limit = LIMITS[code]
    scales = x.abs().amax(-1) / limit
    ratios = (x / torch.where(scales == 0, 1.0, scales)[..., None]).clamp(-limit, limit)
    codes = ratios.round().to(torch.int8) if code == torch.int8 else ratios.to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, scales


def dequantized(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 numbers of codes [..., d] with scales [...]."""
    numbers = codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)
    return numbers.float() * scales[..., None]
