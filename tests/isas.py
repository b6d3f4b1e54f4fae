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


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    if native.available():
        native.force_isa(None)
