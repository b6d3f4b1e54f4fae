"""Where the real data lies that tests read but the project does not contain."""

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("KVASIR_SHARED", Path(__file__).resolve().parents[1].parent / "shared"))


def need(*parts: str) -> Path:
    """The path of a shared file or folder; skips the test with a reason where it is absent."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"shared data {'/'.join(parts)} is not at {SHARED} (set KVASIR_SHARED)")
    return path
