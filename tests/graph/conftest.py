"""Padding rows compute with whatever memory holds, and the interpreter's NumPy warns of it."""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/graph" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"))
