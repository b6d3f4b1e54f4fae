import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tests that want more threads say so; what they leave is undone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
