"""A fixture for the rooms that compute; their conftest.py imports it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Tests share the machine; those that want more threads say so, and what they leave is undone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
