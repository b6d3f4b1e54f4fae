"""The end of an answer stays in sight on the page, and no message stands in the way of those after it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.settings import ServeSettings
from tests.serve.page.browser import DONE, NEEDED, answer, answers_with, ask, fill, page_of, plainly, stream_of
from tests.serve.running import live, live_on
from tests.serve.shelf import Launcher, Shelf, offer

pytestmark = NEEDED

LINES = "".join(f"{i}\n\n" for i in range(60))
BELOW = (
    "(() => { const m = document.getElementById('messages'); return m.scrollHeight - m.scrollTop - m.clientHeight })()"
)


def below(page: Page) -> float:
    """Pixels of the conversation that are under the fold."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(BELOW)


def grown(page: Page, paragraphs: int) -> None:
    """Waits until the answer has so many."""
    expect(page.locator(".message.assistant p").nth(paragraphs)).to_be_attached()


def scroll(page: Page, pixels: int) -> None:
    page.hover("#messages")
    page.mouse.wheel(0, pixels)
    page.wait_for_timeout(200)


@pytest.mark.parametrize("pieces", [1, 2, 60])
def test_the_end_of_an_answer_is_seen(page, server, pieces):
    size = len(LINES) // pieces
    answers_with(page, stream_of(*[{"content": LINES[i : i + size]} for i in range(0, len(LINES), size)]))
    ask(page, "count")
    assert below(page) < 2
    expect(page.locator(f"{DONE} summary")).to_be_in_viewport()


def test_the_fields_for_the_results_of_tools_are_seen(page, server):
    calls = [{"index": i, "id": f"c{i}", "function": {"name": f"f{i}", "arguments": '{"a": 1}'}} for i in range(3)]
    answers_with(page, stream_of({"content": LINES}, {"tool_calls": calls}, finish="tool_calls"))
    ask(page, "call")
    assert below(page) < 2


def test_an_answer_is_followed_while_it_comes_and_until_it_ends(browser):
    with live(step_seconds=0.004, max_model_len=2048) as server, page_of(browser, server.url) as page:
        plainly(page, 700)
        ask(page, LINES, wait=False)
        grown(page, 30)
        page.fill("#prompt", "several\nlines\nof\na\nlater\nmessage")  # the composer grows
        page.wait_for_selector(DONE)
        assert below(page) < 2


def test_a_page_scrolled_up_stays_there_until_it_is_scrolled_down(browser):
    with live(step_seconds=0.01, max_model_len=2048) as server, page_of(browser, server.url) as page:
        plainly(page, 700)
        ask(page, LINES, wait=False)
        grown(page, 30)
        scroll(page, -600)
        top = page.evaluate("document.getElementById('messages').scrollTop")
        grown(page, 60)
        assert page.evaluate("document.getElementById('messages').scrollTop") == top
        scroll(page, 100_000)
        page.wait_for_selector(DONE)
        assert below(page) < 2


def test_a_message_that_is_too_long_does_not_block_the_next(browser, server):
    with page_of(browser, server.url, expected=("status of 400",)) as page:
        plainly(page, 30)
        ask(page, "one")
        ask(page, "x" * 600, wait=False)
        expect(page.locator(".message .error")).to_contain_text("maximum context length is 512")
        expect(page.locator(".notes").last).to_contain_text("left out")
        page.reload()  # it is known afterwards, too
        ask(page, "two")
        assert answer(page).startswith("user: one") and "error" not in page.inner_text(".message:last-child")
        messages = page.evaluate("probes.conversation().messages.map((m) => m.content.length)")
        assert messages[2] == 600, "it is still there to be read and edited"
        page.click(".message.user >> nth=1 >> text=Edit")
        ask(page, "three")
        expect(page.locator(".message")).to_have_count(4)


def test_a_tool_result_that_is_too_long_is_left_out_with_its_turn(browser, server):
    call = {"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}
    error = {"message": "This model's maximum context length is 9 tokens", "code": "context_length_exceeded"}
    with page_of(browser, server.url, expected=("status of 400",)) as page:
        bodies = answers_with(
            page, stream_of({"content": "hi"}), stream_of({"tool_calls": [call]}, finish="tool_calls"),
            {"error": error}, stream_of({"content": "ok"}),
        )  # fmt: skip
        ask(page, "one")
        ask(page, "use it")
        page.fill("[aria-label='Result of f']", "y" * 100)
        page.click("text=Send the result")
        expect(page.locator(".message .error")).to_be_visible()
        ask(page, "two")
        assert [m["content"] for m in bodies[-1]["messages"]] == ["one", "hi", "two"]


def test_a_turn_that_failed_is_sent_again_unless_it_was_too_long(browser, server):
    with page_of(browser, server.url, expected=("status of 400",)) as page:
        bodies = answers_with(page, {"error": {"message": "no"}}, stream_of({"content": "ok"}))
        ask(page, "one", wait=False)
        expect(page.locator(".message .error")).to_be_visible()
        ask(page, "two")
        assert [m["content"] for m in bodies[-1]["messages"]] == ["one", "two"]


def test_a_model_that_is_loading_is_shown_as_such(browser):
    gate, launcher = [], Launcher()

    def make() -> ModelManager:
        import asyncio

        gate.append(asyncio.Event())
        launcher.gate = gate[0]
        return ModelManager(Shelf([offer("first"), offer("second")]), launcher, ServeSettings(port=0))

    with live_on(make) as server, page_of(browser, server.url, expected=("503",)) as page:
        fill(page, temperature="0", max_tokens="12")
        page.select_option("#models", "second")
        ask(page, "hello", wait=False)
        waiting = page.locator(".message.assistant")
        expect(waiting).to_contain_text("second is being loaded")
        page.click("#tab-engine")
        rows = page.locator("#view-engine > .panel tbody tr")
        page.click("[aria-label='Load first']")
        expect(rows.nth(0)).to_contain_text("loading …")
        server.loop.call_soon_threadsafe(gate[0].set)
        page.click("#tab-chat")
        page.wait_for_selector(DONE)
        assert answer(page) == "user: hello\n"[:12].strip()
        expect(waiting).not_to_contain_text("being loaded")
        ask(page, "again")
        expect(waiting.last).not_to_contain_text("being loaded")


def test_the_settings_of_the_chat_are_offered_where_the_chat_is(page, server):
    expect(page.locator("#options")).to_be_visible()
    page.click("#options")
    page.click("#tab-engine")
    expect(page.locator("#options")).to_be_hidden()
    page.click("#tab-chat")
    expect(page.locator("#settings")).to_be_visible()


def test_icons_are_drawn_and_need_no_font(page, server):
    """Signs beyond those that all fonts have are drawn."""
    page.evaluate("document.getElementById('key').hidden = false")
    ask(page, "hello")
    assert page.locator("button.icon svg").count() >= 3
    texts = page.evaluate("document.body.innerText")
    assert not re.findall(r"[^\x20-\x7e\n\t\xa0-\xff‹›“”‘’–—…·]", texts)
