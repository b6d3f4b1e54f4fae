"""The libraries that torch uses: their versions, builds and settings, which determine their choice of kernels."""

from __future__ import annotations

import torch

from kvasir.device.capability import processor_flags
from kvasir.environment import library_settings


def library_facts(kind: str) -> list[str]:
    """These facts as lines of text. kind: "cpu" or "cuda"."""
    backends = torch.backends
    lines = [
        torch.__config__.show(),
        f"{backends.cpu.get_cpu_capability()} {' '.join(sorted(processor_flags()))}",
        f"mkldnn {backends.mkldnn.is_available()} {backends.mkldnn.enabled} {backends.mkldnn.deterministic}",
        f"precision {torch.get_float32_matmul_precision()}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        *(f"{name}={value}" for name, value in library_settings().items()),
    ]
    return lines + _gpu_facts() if kind == "cuda" else lines


def _gpu_facts() -> list[str]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return [
        f"cuda {torch.version.cuda} {torch.version.hip} {torch.cuda.get_device_capability()}",
        f"cudnn {cudnn.version()} {cudnn.enabled} {cudnn.deterministic} {cudnn.benchmark} {cudnn.allow_tf32}",
        f"matmul {matmul.allow_tf32} {matmul.allow_fp16_reduced_precision_reduction} "
        f"{matmul.allow_bf16_reduced_precision_reduction}",
    ]
