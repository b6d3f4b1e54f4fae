import pytest


@pytest.fixture(scope="module")
def browser():
    from tests.serve.page.browser import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    from tests.serve.page.browser import page_of

    with page_of(browser, server.url) as page:
        yield page
