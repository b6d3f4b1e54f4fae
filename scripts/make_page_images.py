#!/usr/bin/env python3
"""Takes the screenshots in docs/page.md: the bundled model on a desktop and a phone, and its engines under load.

    python scripts/make_page_images.py                     writes all of docs/images/page-*.png
    python scripts/make_page_images.py chat phone          only these
    python scripts/make_page_images.py --folder /tmp/x     elsewhere

Needs playwright and matplotlib's Pillow (the dev extra) and Chromium (scripts/install_chromium.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from playwright.sync_api import TimeoutError as TooLate

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
MOST = 200_000  # bytes of a picture
COLOURS = 256  # of a picture
# Few blocks, so that sequences are preempted; fewer rows than clients, so that some wait.
SMALL = ("--block-size", "16", "--num-blocks", "512", "--max-num-seqs", "24", "--max-num-batched-tokens", "256")
CLIENTS = 28
FLEET = ("--replicas", "2", "--block-size", "16", "--num-blocks", "512", "--max-num-seqs", "12")
LOAD_SECONDS = 45
ATTEMPTS = 10  # to take a picture of a replica that is away, for a second or less
PATIENCE = 300  # seconds, for a busy machine
ANIMALS = ("fox", "bear", "pig", "owl", "frog", "deer")
# Written for the picture: the bundled model writes neither code nor formulas.
ANSWER = r"""The expected number of comparisons is

$$C(n) = 2(n+1)\sum_{k=1}^{n} \frac{1}{k} - 4n \approx 1.39\, n \log_2 n$$

```python
def quick_sort(numbers: list[int]) -> list[int]:
    if len(numbers) < 2:
        return numbers  # a list of one number is sorted
    pivot, *rest = numbers
    low = [n for n in rest if n < pivot]
    return [*quick_sort(low), pivot, *quick_sort([n for n in rest if n >= pivot])]
```

| input | comparisons |
|---|---:|
| in random order | $O(n \log n)$ |
| sorted already | $O(n^2)$ |
"""
TITLES = ("How fast is quick sort?", "Names for a boat", "Plural of octopus")
KEPT = [
    {
        "id": str(i),
        "title": title,
        "updated": 9 - i,
        "messages": [{"role": "user", "content": title}, {"role": "assistant", "content": ANSWER, "finish": "stop"}],
    }
    for i, title in enumerate(TITLES)
]


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
    """Runs clients that send one request after another, without streams, which would keep the server busier than its
    engines; their prompts share a few prefixes."""
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
            "service_class": draw.choice(("interactive", "interactive", "batch")),
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with suppress(OSError), urllib.request.urlopen(request, timeout=120) as response:
            response.read()


def ask(page: Page, text: str) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(".message.assistant[aria-busy=false]:last-child", timeout=PATIENCE * 1000)
    page.wait_for_selector("#send", timeout=PATIENCE * 1000)


@contextmanager
def desktop(browser: Browser, address: str, height: int = 640, **options: Any) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1180, "height": height}, device_scale_factor=1.5, **options)
    page.goto(address)
    yield page
    page.close()


def keep(page: Page, path: Path) -> None:
    """Takes the picture, with few colours, which makes the file small."""
    page.screenshot(path=path)
    with Image.open(path) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size} bytes", flush=True)
    if size > MOST:
        raise SystemExit(f"{path} is larger than {MOST} bytes")


# -- the pictures ----------------------------------------------------------------------------------------------------


def chat(browser: Browser, path: Path) -> None:
    """A story and an addition, with the pointer on the story's first token."""
    with served() as url, desktop(browser, url) as page:
        page.click("#options")
        page.fill("[name=seed]", "7")
        page.check("[name=shade]")
        page.check("[name=drafts]")
        page.click("#options")
        ask(page, "Tell me a short story\nabout a fox.")
        ask(page, "What is 23 + 45?")
        page.click(".figures summary >> nth=0")
        page.hover(".message.assistant .t >> nth=0")
        keep(page, path)


def dark(browser: Browser, path: Path) -> None:
    """A kept conversation with code and formulas, in the dark theme."""
    with served() as url, desktop(browser, url, 720, color_scheme="dark") as page:
        for kept in KEPT:
            page.evaluate(
                "([name, text]) => localStorage.setItem(name, text)", [f"kvasir.chat.{kept['id']}", json.dumps(kept)]
            )
        page.reload()
        page.wait_for_selector(".math")
        page.evaluate("document.fonts.ready")
        keep(page, path)


def empty(browser: Browser, path: Path) -> None:
    with served() as url, desktop(browser, url, 520) as page:
        page.wait_for_selector(".examples button")
        keep(page, path)


def phone(browser: Browser, path: Path) -> None:
    with served() as url:
        page = browser.new_page(
            viewport={"width": 390, "height": 700}, device_scale_factor=2, is_mobile=True, has_touch=True
        )
        page.goto(url)
        page.click("#options")
        page.fill("[name=seed]", "7")
        page.click("#options")
        ask(page, "Tell me a short story about a fox.")
        page.click(".figures summary")
        keep(page, path)
        page.close()


def engine(browser: Browser, path: Path) -> None:
    with served(*SMALL) as url, load(url), desktop(browser, f"{url}/#engine", 1180) as page:
        page.wait_for_selector(".tile")
        time.sleep(LOAD_SECONDS)
        page.hover("canvas.map", position={"x": 300, "y": 60})
        keep(page, path)


def replicas(browser: Browser, path: Path) -> None:
    """Two replicas at work."""
    with served(*FLEET) as url, load(url), desktop(browser, f"{url}/#engine", 760) as page:
        page.wait_for_selector(".tile")
        time.sleep(LOAD_SECONDS)
        keep(page, path)


def killed(browser: Browser, path: Path) -> None:
    """Two replicas at work, one of which has just been killed."""
    with served(*FLEET) as url, load(url), desktop(browser, f"{url}/#engine", 480) as page:
        page.wait_for_selector(".tile")
        time.sleep(LOAD_SECONDS)
        for _ in range(ATTEMPTS):
            with urllib.request.urlopen(f"{url}/fleet") as response:
                busiest = max(json.load(response)["replicas"], key=lambda replica: replica["open"])
            os.kill(busiest["pid"], signal.SIGKILL)
            with suppress(TooLate):
                page.wait_for_selector(".fleet .error", timeout=3000)
                keep(page, path)
                return
            time.sleep(3)
        raise SystemExit("the page never showed that a replica was away")


PICTURES = {
    "chat": chat,
    "dark": dark,
    "empty": empty,
    "phone": phone,
    "engine": engine,
    "replicas": replicas,
    "killed": killed,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Takes the screenshots of the page.")
    parser.add_argument("pictures", nargs="*", help=f"of {', '.join(PICTURES)}; all by default")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    if unknown := set(arguments.pictures) - set(PICTURES):
        parser.error(f"no such pictures: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name in arguments.pictures or PICTURES:
            PICTURES[name](browser, arguments.folder / f"page-{name}.png")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
