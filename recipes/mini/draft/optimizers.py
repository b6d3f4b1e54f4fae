"""Muon for the matrices of the layers (Jordan et al., 2024), AdamW for tables and norms.

torch's Muon computes in bfloat16, which takes ten times as long on processors without instructions for it.
"""

import torch
from torch import Tensor, nn

TABLES = ("embed", "lm_head")
QUINTIC = (3.4445, -4.775, 2.0315)  # Jordan's coefficients: any singular value comes near 1 in five rounds
MOMENTUM, DECAY = 0.95, 0.01


def orthogonal(gradient: Tensor) -> Tensor:
    """The nearest orthogonal matrix, roughly: singular values between about 0.7 and 1.2. [m, n] to [m, n]."""
    a, b, c = QUINTIC
    x = gradient if gradient.shape[0] <= gradient.shape[1] else gradient.T
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x if x.shape == gradient.shape else x.T


class Optimizers:
    """Both, at one rate: Muon's updates are scaled to the size of AdamW's."""

    def __init__(self, drafter: nn.Module, rate: float) -> None:
        named = dict(drafter.named_parameters())
        self.matrices = [p for n, p in named.items() if p.dim() == 2 and n not in TABLES]
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        others = [p for n, p in named.items() if p.dim() == 1 or n in TABLES]
        self.rate, self.others = rate, torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, share: float) -> None:
        """One update at `share` of the full rate; forgets the gradients."""
        rate = self.rate * share
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            assert p.grad is not None
            momentum.lerp_(p.grad, 1 - MOMENTUM)
            update = orthogonal(p.grad.lerp(momentum, MOMENTUM))
            p.mul_(1 - rate * DECAY).add_(update, alpha=-rate * 0.2 * max(p.shape) ** 0.5)
            p.grad = None
        for group in self.others.param_groups:
            group["lr"] = rate
        self.others.step()
        self.others.zero_grad(set_to_none=True)
