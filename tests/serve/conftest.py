import httpx
import pytest

from kvasir.text.template_process import TemplateRenderer
from tests.serve.running import client, live


@pytest.fixture(scope="package", autouse=True)
def _shared():
    """What takes long to make and is the same for all these tests: the process that renders chat templates, and the
    certificates that each client reads, which no test here needs."""
    renderer, certificates = TemplateRenderer(), httpx.create_ssl_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", lambda **_: certificates)
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
