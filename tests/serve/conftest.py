import ssl
from typing import Any

import httpx
import pytest

from kvasir.text.template_process import TemplateRenderer
from tests.serve.running import client, live


@pytest.fixture(scope="package", autouse=True)
def _shared():
    """What takes long to make and is the same for all these tests: the process that renders chat templates, and the
    certificates that each client reads."""
    renderer, make = TemplateRenderer(), httpx.create_ssl_context
    certificates = make()

    def context(verify: Any = True, **options: Any) -> ssl.SSLContext:
        return certificates if verify is True else make(verify=verify, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", context)
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
