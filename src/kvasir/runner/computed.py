"""What executors say of adapters that they cannot compute."""

from __future__ import annotations

from typing import NoReturn

from kvasir.errors import UnsupportedModel


def refuse(executor: str, what: str) -> NoReturn:
    """Raises UnsupportedModel for what an executor cannot compute of an adapter."""
    raise UnsupportedModel(
        f"the adapter has {what}, which {executor} cannot compute",
        "use --executor eager, which computes all kinds of adapters",
    )
