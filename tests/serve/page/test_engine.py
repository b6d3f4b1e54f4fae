"""The page's view of the engine in a real browser, and what must hold on every screen and for everybody."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from kvasir.serve.page.tiles import tiles
from tests.serve.page.browser import DONE, NEEDED, answers_with, ask, page_of, plainly, stream_of
from tests.serve.running import live

pytestmark = NEEDED


def test_the_engine_is_shown_at_work_and_at_rest(browser):
    with live(step_seconds=0.05, max_rows=1) as server, page_of(browser, server.url) as page:
        other = page.context.new_page()
        other.goto(server.url)
        for tab in (page, other):
            ask(tab, "hello", wait=False)
            tab.wait_for_selector(".message.assistant")
        page.click("#tab-engine")
        running = page.locator(".tile").first
        expect(running.locator("dd").first).to_have_text("1")
        expect(running.locator("dd").last).to_have_text("1 waiting")
        expect(page.locator(".requests tbody tr")).to_have_count(2)
        expect(page.locator(".requests tbody tr").first).to_contain_text("row 0")
        expect(page.locator(".panel canvas").nth(1)).to_have_attribute("aria-label", re.compile("The last step took"))
        painted = [canvas.evaluate("(canvas) => probes.painted(canvas)") for canvas in page.locator("canvas").all()]
        assert len(painted) == 3 and painted[1] >= 2 and painted[2] >= 2, painted
        assert "in use" in page.get_attribute("canvas.map", "aria-label")
        page.hover("canvas.map", position={"x": 5, "y": 5})
        expect(page.locator(".place")).to_contain_text("Block 1")
        other.keyboard.press("Escape")
        page.click("#tab-chat")
        page.keyboard.press("Escape")
        page.click("#tab-engine")
        expect(running.locator("dd").first).to_have_text("0")
        expect(page.locator(".requests tbody").last).to_contain_text("No requests are running or waiting.")


def test_the_tiles_equal_those_of_the_statistics_table(page, server):
    ask(page, "hello")
    page.click("#tab-engine")
    shown = page.locator(".tile")
    expect(shown.locator("dt")).to_have_text(
        [title for title, numbers in tiles().items() if not numbers[0]["optional"]]
    )
    found = {tile.locator("dt").inner_text(): tile.locator("dd").all_inner_texts() for tile in shown.all()}
    assert found["Running"] == ["0", "0 waiting"]
    assert re.fullmatch(r"\d+/s", found["Generated"][0]) and re.fullmatch(
        r"[\d,]+ tokens in all", found["Generated"][1]
    )
    assert re.fullmatch(r"[\d.]+ m?s", found["First token"][0]) and "p95" in found["First token"][1]
    assert re.match(r"(–|[\d.]+ %)$", found["Prefix hits"][0]) and "tokens" in found["Prefix hits"][1]
    assert found["KV in use"][0] == "0 %" and found["KV in use"][1].endswith("% cached, idle")
    assert found["Preemptions"] == ["0", "0 blocks evicted"]


def test_a_hidden_page_asks_for_no_data(page, server):
    seen = []
    page.on("request", lambda request: seen.append(request.url))
    page.click("#tab-engine")
    expect(page.locator(".tile").first).to_be_visible()
    page.click("#tab-chat")
    page.wait_for_timeout(300)
    seen.clear()
    page.wait_for_timeout(1500)
    assert not seen


def test_the_map_of_blocks_is_read_with_the_keys(browser):
    with live(step_seconds=0.05, num_blocks=2000) as server, page_of(browser, server.url) as page:
        ask(page, "hello", wait=False)
        page.click("#tab-engine")
        place = page.locator(".place")
        expect(page.locator(".requests tbody tr")).to_contain_text(["row 0"])
        page.focus("canvas.map")
        for key, block in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("ArrowUp", 1)):
            page.keyboard.press(key)
            expect(place).to_contain_text(f"Block {block}:")
        expect(place).to_have_text(re.compile(r"Block 1: (row 0 \(\w{8}\)|free|idle)"))
        page.keyboard.press("ArrowDown")
        expect(place).to_have_text(re.compile(r"Block \d\d+:"))
        page.keyboard.press("Escape")
        page.click("#tab-chat")
        page.keyboard.press("Escape")


def test_toggling_the_page_does_not_change_its_polling_rate(page, server):
    for _ in range(5):
        page.click("#tab-engine")
        page.evaluate("document.dispatchEvent(new Event('visibilitychange', { bubbles: true }))")
        page.click("#tab-chat")
    page.click("#tab-engine")
    expect(page.locator(".tile").first).to_be_visible()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    while not asked:
        page.wait_for_timeout(50)
    page.wait_for_timeout(2500)
    assert len(asked) <= 4


# -- for everybody -----------------------------------------------------------------------------------------------


def test_a_conversation_of_a_thousand_messages_opens_at_its_end_and_continues(page, server):
    text = "A paragraph with **bold** words and `code`.\n\n- one\n- two\n\n" * 4
    reply = [{"role": ("user", "assistant")[i % 2], "content": f"{i} {text}", "finish": "stop"} for i in range(1000)]
    chat = {"id": "long", "title": "long", "updated": 1, "messages": reply}
    page.evaluate("([name, chat]) => (localStorage[name] = chat)", ["kvasir.chat.long", json.dumps(chat)])
    page.reload()
    expect(page.locator(".message")).to_have_count(1000)
    expect(page.locator(".message").last).to_be_in_viewport()
    answers_with(page, stream_of(*[{"content": "word "}] * 300))
    ask(page, "more")
    expect(page.locator(".message.assistant").last).to_be_in_viewport()
    expect(page.locator(".message")).to_have_count(1002)
    page.locator(".message").first.scroll_into_view_if_needed()
    expect(page.locator(".message").first).to_be_in_viewport()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_small_screen_in_both_schemes(browser, server, scheme):
    with page_of(browser, server.url, viewport={"width": 360, "height": 700}, color_scheme=scheme) as page:
        page.click("#options")
        page.fill("[name=max_tokens]", "200")
        page.click("#options")
        ask(page, "word " * 20 + "x" * 90)
        for tab in ("chat", "engine"):
            page.click(f"#tab-{tab}")
            page.wait_for_timeout(200)
            assert page.evaluate("probes.tooWide()") == []
        page.click("#tab-chat")
        page.click("#menu")
        expect(page.locator("#sidebar")).to_be_visible()
        page.click("#new")
        expect(page.locator("#sidebar")).to_be_hidden()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(247, 245, 241)"
        assert dark == (scheme == "dark")


def test_a_wide_table_scrolls_and_breaks_no_words(browser, server):
    rows = [f"|{'|'.join(cells)}|" for cells in (["head"] * 12, ["-"] * 12, ["several words"] * 12)]
    with page_of(browser, server.url, viewport={"width": 360, "height": 700}) as page:
        answers_with(page, stream_of({"content": "\n".join(rows)}))
        ask(page, "table")
        assert page.evaluate("probes.tooWide()") == []
        box = page.locator(".message .table")
        assert box.evaluate("(e) => e.scrollWidth > e.clientWidth")
        lines = box.locator("td").first.evaluate("(e) => e.clientHeight / parseFloat(getComputedStyle(e).lineHeight)")
        assert lines < 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_and_every_control_a_name(browser, server, scheme):
    with page_of(browser, server.url, color_scheme=scheme) as page:
        plainly(page, 5)
        ask(page, "hey")
        page.click("#options")
        for tab in ("chat", "engine"):
            page.click(f"#tab-{tab}")
            page.wait_for_timeout(300)
            assert page.evaluate("probes.pale()") == []
        assert page.evaluate("probes.nameless()") == []


def test_the_keyboard_reaches_everything(page, server):
    plainly(page, 5)
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#view-engine")).to_be_visible()
    assert page.evaluate("document.activeElement.id") == "tab-engine"
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#view-chat")).to_be_visible()
    page.focus("#prompt")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    page.wait_for_selector(DONE)
    expect(page.locator(".message.user .plain")).to_have_text("a\nb")
    page.focus("#options")
    page.keyboard.press("Enter")
    expect(page.locator("#settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    reached = set()
    page.focus("#menu" if page.is_visible("#menu") else "#tab-chat")
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {"options", "new", "prompt", "send", "Regenerate", "Copy"} <= reached
