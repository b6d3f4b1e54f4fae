import pytest

from kvasir.text.template_process import TemplateRenderer
from tests.serve.running import client, live


@pytest.fixture(scope="package", autouse=True)
def _one_renderer():
    """Of all chat templates of these tests: each would start a process of its own."""
    renderer = TemplateRenderer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvasir.text.chat.TemplateRenderer", lambda: renderer)
        yield
    renderer.close()


@pytest.fixture
async def http():
    async with client() as http:
        yield http


@pytest.fixture(scope="module")
def server():
    """One server on a socket for the tests of a module that do not set it up themselves."""
    with live() as server:
        yield server
