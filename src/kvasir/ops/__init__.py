"""The ops: one folder per family, with the declarations in `__init__`, their plain torch bodies in `body`, and other
implementations."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from kvasir.ops.registry import BODY, OPS, Choice, MachineFacts, choose_all

if TYPE_CHECKING:
    from kvasir.device import Device

FAMILIES = (
    *("activation", "attention", "columns", "embedding", "gated_delta", "indexer", "linear", "moe", "norm", "rope"),
    "short_conv",
    "ssm",
    "streams",
)


def choose(device: Device, dtype: str = "float32", wanted: Mapping[str, str] | None = None) -> tuple[Choice, ...]:
    """Selects an implementation of every op for a device, once at start. wanted: forced choices, e.g. {"rms_norm":
    "torch"}.

    Raises ConfigError if a forced implementation cannot run.
    """
    _declare()
    return choose_all(MachineFacts(device, dtype), wanted)


def table() -> tuple[Choice, ...]:
    """The selected implementations, by op and device; an op without a selection uses its body."""
    _declare()
    return tuple(
        choice for name, op in sorted(OPS.items()) for choice in (op.choices.values() or (Choice(name, "any", BODY),))
    )


def _declare() -> None:
    for name in FAMILIES:
        import_module(f"kvasir.ops.{name}")


__all__ = ["BODY", "Choice", "choose", "table"]
