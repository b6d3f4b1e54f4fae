#!/usr/bin/env python3
"""Takes the screenshots in docs/page.md: the bundled model on a desktop and a phone, and its engine under load.

    python scripts/make_page_images.py [folder]     writes page-*.png (default: docs/images)

Needs playwright (the dev extra) and Chromium (scripts/install_chromium.sh).
"""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
MOST = 300_000  # bytes of a picture
# Few blocks, so that sequences are preempted; fewer rows than clients, so that some wait.
SMALL = ("--block-size", "16", "--num-blocks", "512", "--max-num-seqs", "24", "--max-num-batched-tokens", "256")
CLIENTS = 28
LOAD_SECONDS = 45
PATIENCE = 300  # seconds, for a busy machine
ANIMALS = ("fox", "bear", "pig", "owl", "frog", "deer")


@contextmanager
def served(*options: str) -> Iterator[str]:
    """Runs a server of the bundled model; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "kvasir.cli", "serve", "kvasir-mini", "--port", str(port), *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + PATIENCE
        while not _answers(f"{url}/health"):
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit("the server did not start")
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=2) as response:
        return response.status == 200
    return False


@contextmanager
def load(url: str) -> Iterator[None]:
    """Runs clients that send one request after another; their prompts share a few prefixes."""
    over = threading.Event()
    clients = [threading.Thread(target=_ask, args=(url, number, over)) for number in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()


def _ask(url: str, number: int, over: threading.Event) -> None:
    draw = random.Random(number)
    while not over.is_set():
        animal = draw.choice(ANIMALS)
        known = f"This is the story of a {animal}. " + f"The {animal} was kind and had many friends. " * 12
        body = {
            "messages": [
                {"role": "system", "content": known},
                {"role": "user", "content": f"Tell me a short story about a {animal}, number {draw.randrange(1000)}."},
            ],
            "max_tokens": draw.randrange(100, 400),
            "ignore_eos": True,
            "seed": number,
            "stream": True,
            "service_class": draw.choice(("interactive", "interactive", "batch")),
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with suppress(OSError), urllib.request.urlopen(request, timeout=120) as response:
            response.read()


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant:last-child .figures:not(:empty)", timeout=PATIENCE * 1000)


def chat(browser: Browser, path: Path) -> None:
    """Takes the picture of a chat: a story and an addition, with the pointer on the story's first token."""
    with served() as url:
        page = browser.new_page(viewport={"width": 1100, "height": 620})
        page.goto(url)
        page.click("#options")
        page.fill("[name=seed]", "7")
        page.check("[name=shade]")
        page.check("[name=drafts]")
        page.click("#options")
        ask(page, "Tell me a short story\nabout a fox.")
        ask(page, "What is 23 + 45?")
        page.hover(".message.assistant .t >> nth=0")
        page.screenshot(path=path)
        page.close()


def empty(browser: Browser, path: Path) -> None:
    """Takes the picture of an empty conversation in the dark theme."""
    with served() as url:
        page = browser.new_page(viewport={"width": 1100, "height": 620}, color_scheme="dark")
        page.goto(url)
        page.wait_for_selector(".examples button")
        page.screenshot(path=path)
        page.close()


def phone(browser: Browser, path: Path) -> None:
    with served() as url:
        page = browser.new_page(viewport={"width": 390, "height": 700}, is_mobile=True, has_touch=True)
        page.goto(url)
        ask(page, "Tell me a short story\nabout a fox.")
        page.screenshot(path=path)
        page.close()


PICTURES = ("chat", "dark", "phone", "engine")


def engine(browser: Browser, path: Path) -> None:
    with served(*SMALL) as url, load(url):
        page = browser.new_page(viewport={"width": 1100, "height": 1180})
        page.goto(f"{url}/#engine")
        page.wait_for_selector(".tile")
        time.sleep(LOAD_SECONDS)
        page.hover("canvas.map", position={"x": 300, "y": 60})
        page.screenshot(path=path)
        page.close()


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0]) if arguments else FOLDER
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, take in zip(PICTURES, (chat, empty, phone, engine), strict=True):
            name = f"page-{name}.png"
            take(browser, folder / name)
            size = (folder / name).stat().st_size
            print(f"{folder / name}: {size} bytes")
            assert size <= MOST, f"larger than {MOST} bytes"
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
