"""The page of a server of several models, in a real browser."""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager

import pytest

from kvasir.serve.server import Server, bind
from kvasir.serve.settings import ServeSettings
from kvasir.serve.several import Several
from tests.serve.shelf import Launcher, Shelf, offer

pytest.importorskip("playwright", reason="playwright is not installed (it is in the dev extra)")

from playwright.sync_api import expect

from tests.serve.browser import CHROMIUM, MILLISECONDS, WHY_NOT, chromium, page_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]
expect.set_options(timeout=MILLISECONDS)


@contextmanager
def several(*names: str):
    """Its address, and what it launched."""
    launcher, ready, found = Launcher(), threading.Event(), []

    async def main() -> None:
        settings = ServeSettings(port=0)
        with bind(settings) as listener:
            catalogue = Several(Shelf([offer(name) for name in names]), launcher, settings)
            server = Server(catalogue)
            found.append(server)
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            found.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
            ready.set()
            await serving
            await catalogue.stop()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield found[1], launcher
    finally:
        found[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_the_model_that_is_chosen_answers_and_is_looked_at():
    with (
        chromium() as browser,
        several("first", "second") as (url, launcher),
        page_of(browser, url, expected=("503",)) as page,
    ):
        expect(page.locator("#models")).to_be_visible()
        expect(page.locator("#model")).to_be_hidden()
        page.select_option("#models", "second")
        expect(page).to_have_title("second – Kvasir")
        page.fill("#prompt", "hello")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".message.assistant:last-child .figures")
        assert "user: hello" in page.inner_text(".message.assistant:last-child .markdown")
        assert launcher.there == ["second"]
        page.click("#tab-engine")
        expect(page.locator("#view-engine")).to_contain_text("an answer")
        page.select_option("#models", "first")
        expect(page.locator("#view-engine .error")).to_contain_text("no model is loaded")
        assert launcher.there == ["second"], "looking loads nothing"


def test_one_model_or_none_needs_no_choice():
    with chromium() as browser, several("only") as (url, _), page_of(browser, url) as page:
        expect(page.locator("#model")).to_have_text("only")
        expect(page.locator("#models")).to_be_hidden()
    with chromium() as browser, several() as (url, _), page_of(browser, url) as page:
        expect(page.locator("#models")).to_be_visible()
        expect(page).to_have_title("Kvasir")
