"""How many examples a property is tried with."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(most: int, **more: Any) -> settings:
    """Settings of at most so many examples with the profile "explore", and of a fifth of them in the fast tests."""
    fast = settings.get_current_profile_name() == "kvasir"
    return settings(max_examples=max(3, most // 5) if fast else most, **more)
