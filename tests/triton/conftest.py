"""The interpreter takes minutes for these tests, and `make test` does not install Triton: all of them are slow."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/triton" in str(item.path):
            item.add_marker(pytest.mark.slow)
