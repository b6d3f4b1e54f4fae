"""The ops: one folder per family, each with its contract (a plain torch body) and its implementations."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from kvasir.device import Device
from kvasir.ops.registry import BODY, OPS, Choice, MachineFacts, choose_all

FAMILIES = ("activation", "attention", "embedding", "gated_delta", "linear", "moe", "norm", "rope")
# Modules that register implementations, by device; imported only for that device.
IMPLEMENTATIONS = {"cpu": ("norm.native",), "cuda": ()}


def choose(device: Device, dtype: str = "float32", wanted: Mapping[str, str] | None = None) -> tuple[Choice, ...]:
    """Selects an implementation of every op for a device, once at start. wanted: forced choices, e.g. {"rms_norm":
    "torch"}.

    Raises ConfigError if a forced implementation cannot run.
    """
    for name in (*FAMILIES, *IMPLEMENTATIONS[device.kind]):
        import_module(f"kvasir.ops.{name}")
    return choose_all(MachineFacts(device, dtype), wanted)


def table() -> tuple[Choice, ...]:
    """The selected implementations, by op and device; an op without a selection uses its body."""
    for name in FAMILIES:
        import_module(f"kvasir.ops.{name}")
    return tuple(
        choice for name, op in sorted(OPS.items()) for choice in (op.choices.values() or (Choice(name, "any", BODY),))
    )


__all__ = ["BODY", "Choice", "choose", "table"]
