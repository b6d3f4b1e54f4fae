"""The instruction sets of this machine, for tests that compute with each."""

import pytest

from kvasir.errors import ConfigError
from kvasir.ops import native


def isas() -> list[str]:
    """Those that can run here, lowest first; none without the native library."""
    found: list[str] = []
    for name in native.ISAS if native.available() else ():
        try:
            found.append(native.force_isa(name))
        except ConfigError:
            break
    if found:
        native.force_isa(None)
    return found


def shapes() -> list[tuple[str, int]]:
    """Instruction sets with the panels of a tile, which AVX-512 can have one or two of."""
    return [(name, panels) for name in isas() for panels in ((1, 2) if name == "avx512" else (1,))]


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    if native.available():
        native.force_isa(None)
        native.lib().kvasir_set_tile_panels(0)
