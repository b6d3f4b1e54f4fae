"""Debian's Chromium for tests of the page: what every page is watched for, and what a user does with it."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("playwright", reason="playwright is not installed (it is in the dev extra)")

from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
WHY_NOT = "no chromium here (scripts/install_chromium.sh installs it where root allows)"
NEEDED = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]  # the marks of such tests
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PROBES = Path(__file__).with_name("browser_probes.js")
MILLISECONDS = 60_000  # for which anything is waited for
DONE = ".message.assistant:last-child .figures"
ENDED = ".message.assistant:last-child[aria-busy=false]"

expect.set_options(timeout=MILLISECONDS)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def page_of(
    browser: Browser, url: str, expected: tuple[str, ...] = (), script: str = "", path: str = "/", **options
) -> Iterator[Page]:
    """A page in a fresh profile, with a script before its own. Afterwards: no script failed, the console shows no error
    but those that have one of the `expected` texts in them, and every request went to `url`, unless "csp" is
    expected: the browser tells of requests that the policy forbids, too."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **options})
    context.set_default_timeout(MILLISECONDS)
    context.add_init_script(path=PROBES)
    if script:
        context.add_init_script(script)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"script: {error}"))

    def asked(request) -> None:
        if not request.url.startswith((f"{url}/", f"blob:{url}/")) and "csp" not in expected:
            faults.append(f"went to {request.url}")

    def heard(message) -> None:
        if message.type == "error" and not any(text in message.text for text in expected):
            faults.append(f"console: {message.text}")

    page.on("request", asked)
    page.on("websocket", lambda found: faults.append(f"went to {found.url}"))
    page.on("console", heard)
    page.goto(url + path)
    try:
        yield page
        assert not faults, faults
    finally:
        context.close()


# -- what a user does ----------------------------------------------------------------------------------------------


def fill(page: Page, **options: str) -> None:
    """Fills settings in."""
    page.click("#options")
    for name, value in options.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#options")


def plainly(page: Page, tokens: int) -> None:
    """Greedy answers of that length: the model repeats the prompt from its beginning."""
    fill(page, temperature="0", max_tokens=str(tokens))


def ask(page: Page, text: str, wait: bool = True) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    if wait:
        page.wait_for_selector(ENDED)
        page.wait_for_selector("#send")  # the stream has ended as well


def answer(page: Page) -> str:
    return page.inner_text(".message.assistant:last-child .markdown")


# -- servers that say what a test wants ----------------------------------------------------------------------------


def stream_of(*deltas: dict, finish: str = "stop") -> str:
    """A whole stream of an answer."""
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    chunks = [{"choices": [choice]} for choice in choices]
    chunks.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": len(deltas)}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def answers_with(page: Page, *streams: str | dict) -> list[dict]:
    """The page is answered with these, in their order: streams, or errors; returns the bodies that it sends, as they
    come."""
    bodies: list[dict] = []

    def respond(route) -> None:
        bodies.append(json.loads(route.request.post_data))
        reported = streams[len(bodies) - 1]
        if isinstance(reported, dict):
            route.fulfill(status=400, json=reported)
        else:
            route.fulfill(body=reported, content_type="text/event-stream")

    page.route("**/v1/chat/completions", respond)
    return bodies


class Cable:
    """A way to a server that can be cut: connections end at once, and new ones are refused until it is mended."""

    def __init__(self, url: str):
        self.to = urlsplit(url).hostname, urlsplit(url).port
        self.ends: list[socket.socket] = []
        self.listener: socket.socket | None = None
        self.port = 0
        self.mend()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def mend(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()

    def cut(self) -> None:
        assert self.listener is not None
        for end in (self.listener, *self.ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.ends.clear()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                ends = listener.accept()[0], socket.create_connection(self.to)
                self.ends += ends
                for source, target in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    @staticmethod
    def _carry(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def cable_to(url: str) -> Iterator[Cable]:
    cable = Cable(url)
    try:
        yield cable
    finally:
        cable.cut()
