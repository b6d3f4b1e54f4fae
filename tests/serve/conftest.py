import pytest

from tests.serve.running import client, live


@pytest.fixture
async def http():
    async with client() as http:
        yield http


@pytest.fixture(scope="module")
def server():
    """One server on a socket for the tests of a module that do not set it up themselves."""
    with live() as server:
        yield server
