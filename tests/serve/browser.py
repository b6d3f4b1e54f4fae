"""Debian's Chromium for tests of the page, and what every page is watched for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
WHY_NOT = "no chromium here (scripts/install_chromium.sh installs it where root allows)"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PROBES = Path(__file__).with_name("browser_probes.js")
MILLISECONDS = 30_000  # for which anything is waited for


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(browser: Browser, url: str, expected: tuple[str, ...] = (), **options) -> Iterator[Page]:
    """A page in a fresh profile. Afterwards: no script failed, the console shows no error but those that have one of
    the `expected` texts in them, and every request went to `url`."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(MILLISECONDS)
    context.add_init_script(path=PROBES)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))
    page.on("request", lambda request: None if request.url.startswith(url) else faults.append(f"went to {request.url}"))

    def heard(message) -> None:
        if message.type == "error" and not any(text in message.text for text in expected):
            faults.append(f"console: {message.text}")

    page.on("console", heard)
    page.goto(url)
    try:
        yield page
        assert not faults, faults
    finally:
        context.close()
