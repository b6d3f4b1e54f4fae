"""The page of a real fleet: a replica is killed during an answer."""

from __future__ import annotations

import os
import signal

import httpx
import pytest
from playwright.sync_api import expect

from tests.e2e.server import serving
from tests.fleet.test_serve import ready
from tests.serve.page.browser import ENDED, NEEDED, answer, ask, fill, page_of
from tests.serve.workers.running import until

pytestmark = NEEDED

# Steps of one token of one row, so that an answer takes a while.
FLAGS = ("--replicas", "2", "--max-model-len", "1024", "--num-blocks", "96", "--no-overlap", "--speculate", "off")
TEXT = "Tell me a long story about a dragon and a princess."


@pytest.fixture(scope="module")
def fleet():
    with serving("kvasir-mini", *FLAGS) as (url, _):
        yield url


def start(page) -> None:
    """Asks for an answer of 900 tokens that the seed decides."""
    fill(page, seed="5", max_tokens="900", other='{"ignore_eos": true}')


def busy(url: str) -> dict:
    """The replica that has the only request."""
    while True:
        found = [replica for replica in ready(url) if replica["open"]]
        if found:
            return found[0]


def test_an_answer_outlives_its_replica_and_the_row_shows_the_replacement(browser, fleet):
    with page_of(browser, fleet) as page:
        start(page)
        ask(page, TEXT)
        whole = answer(page)
        page.click("#new")
        with page.context.new_page() as watch:
            watch.goto(f"{fleet}/#engine")
            rows = watch.locator(".fleet tbody tr")
            expect(rows).to_have_count(2)
            ask(page, TEXT, wait=False)
            expect(page.locator(".message.assistant .markdown")).to_contain_text(" ")
            victim = busy(fleet)
            os.kill(victim["pid"], signal.SIGKILL)
            page.wait_for_selector(ENDED)
            row = rows.nth(victim["index"])
            expect(row.locator("td").nth(1)).to_have_text("ready")
            expect(row.locator("td").last).to_have_text(f"{victim['restarts'] + 1} (1 request)")
            expect(rows.nth(1 - victim["index"]).locator("td").nth(1)).to_have_text("ready")
        assert answer(page) == whole
        expect(page.locator(".message .error")).to_have_count(0)
        until(lambda: ready(fleet)[victim["index"]]["pid"] != victim["pid"])  # the new process has reported
        assert ready(fleet)[victim["index"]]["lost"] == victim["lost"] + 1


def test_a_fleet_fits_a_phone_and_its_rows_add_up(browser, fleet):
    with page_of(browser, fleet, path="/#engine", viewport={"width": 390, "height": 844}) as page:
        rows = page.locator(".fleet tbody tr")
        expect(rows).to_have_count(2)
        assert page.evaluate("probes.tooWide()") == []
        fourth = rows.first.locator("td").nth(3)
        ends = "(cell) => [cell, cell.closest('.table')].map((element) => element.getBoundingClientRect().right)"
        cell, box = fourth.evaluate(ends)
        assert cell <= box + 1
        body = {"prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True}
        assert httpx.post(f"{fleet}/v1/completions", json=body, timeout=60).status_code == 200
        expect(rows.locator("td:nth-child(7)").filter(has_not_text="0 %")).not_to_have_count(0)
