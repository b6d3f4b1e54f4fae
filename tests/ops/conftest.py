import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tests share the machine; those about threads set their own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def exact_linear():
    """Skips where the matrix library under torch does not keep the contract (the engine then says "close")."""
    from kvasir.ops.linear import TILE, linear

    weight = torch.randn(1, 64, 64)
    row = torch.randn(64)
    places = [linear(torch.eye(TILE)[:, [i]] * row, weight)[i] for i in range(TILE)]
    if any(not torch.equal(place, places[0]) for place in places):
        pytest.skip("this machine's matrix library is not exact: the engine grades itself close here")
