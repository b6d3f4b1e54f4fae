"""torch is an extra: the program executor computes without it."""

from __future__ import annotations

from importlib.util import find_spec

from kvasir.errors import ConfigError

INSTALL_TORCH = "pip install 'kvasir-llm[torch]'"


def has_torch() -> bool:
    """Whether torch is installed. Does not import it."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # something hides it
        return False


def need_torch(reason: str) -> None:
    """Raises ConfigError if torch is not installed. reason: why it is needed."""
    if not has_torch():
        raise ConfigError(f"{reason}, and torch is not installed", INSTALL_TORCH)
