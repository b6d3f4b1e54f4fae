import pytest
import torch

from tests.one_thread import one_thread  # noqa: F401 - a fixture of all tests here


@pytest.fixture(scope="session")
def exact_linear():
    """Skips where the matrix library under torch does not keep the contract (the engine then says "close")."""
    from kvasir.ops.linear import TILE, linear

    weight = torch.randn(1, 64, 64)
    row = torch.randn(64)
    places = [linear(torch.eye(TILE)[:, [i]] * row, weight)[i] for i in range(TILE)]
    if any(not torch.equal(place, places[0]) for place in places):
        pytest.skip("this machine's matrix library is not exact: the engine grades itself close here")
