"""Probe: a digest of the bits that the eager executor's libraries compute here, in a few small products and functions.

Libraries choose kernels by the processor, its flags and their own settings, and do not report the choice. Sums that
cancel reveal it: only rounding errors remain, so a different order of additions gives different bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, OUTPUTS = 32, 64  # rows of a tile of `ops.linear`
WIDTHS = (64, 256, 1000)  # 256: width of the chains of `ops.linear`; 1000: long enough for libraries to split the sum


@torch.inference_mode()
def probe(device: str) -> str:
    """SHA-256, in hexadecimal, of the results computed on `device` in each dtype. Takes some milliseconds."""
    digest = hashlib.sha256()
    for out in _outputs(device):
        digest.update(out.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _outputs(device: str) -> Iterator[Tensor]:
    random = np.random.default_rng(0)
    values = torch.from_numpy(_values(random, ROWS, 64)).to(device)
    for dtype in DTYPES:
        for width in WIDTHS:
            x, weight = (torch.from_numpy(part).to(device, dtype) for part in _cancelling(random, width))
            yield F.linear(x, weight)
            yield torch.bmm(x[None], weight.t()[None])
        x = values.to(dtype)
        yield from (x.softmax(-1), F.silu(x), F.gelu(x, approximate="tanh"), x.exp(), x.sum(-1), x.pow(2).mean(-1))
        yield from (x.rsqrt(), x.cos(), F.layer_norm(x, x.shape[-1:]))


def _cancelling(random: np.random.Generator, width: int) -> tuple[np.ndarray, np.ndarray]:
    """x [ROWS, width] and weight [OUTPUTS, width] whose products are zero except for rounding errors."""
    u, v = _values(random, ROWS, width // 2), _values(random, OUTPUTS, width // 2)
    order = random.permutation(width)
    return np.hstack((u, u))[:, order], np.hstack((v, -v))[:, order]


def _values(random: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 values of many magnitudes that each dtype represents exactly."""
    return np.ldexp(random.integers(-255, 256, shape).astype(np.float32), random.integers(-13, -6, shape))
