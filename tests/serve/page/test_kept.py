"""What the browser keeps of the page: two tabs, a full storage, none at all, and what is written while it goes."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from tests.serve.page.browser import NEEDED, answer, ask, page_of, plainly
from tests.serve.running import live

pytestmark = NEEDED


# -- tabs --------------------------------------------------------------------------------------------------------


def test_two_tabs_share_their_conversations(browser, server):
    with page_of(browser, server.url) as page:
        plainly(page, 5)
        other = page.context.new_page()
        other.goto(server.url)
        ask(page, "from the first")
        expect(other.locator("#conversations .entry")).to_have_text(["from the first"])
        ask(other, "from the second")
        expect(page.locator("#conversations .entry")).to_have_count(2)


def test_two_tabs_share_a_conversation(browser, server):
    with page_of(browser, server.url) as page:
        plainly(page, 5)
        ask(page, "one")
        other = page.context.new_page()
        other.goto(server.url)
        ask(other, "two")
        expect(page.locator(".message.user")).to_have_text([re.compile("one"), re.compile("two")])
        ask(page, "three")
        expect(other.locator(".message.user")).to_have_count(3)
        expect(page.locator("#conversations .entry")).to_have_count(1)


def test_two_tabs_that_write_in_one_conversation_lose_nothing(browser):
    with live(step_seconds=0.05) as server, page_of(browser, server.url) as page:
        plainly(page, 5)
        ask(page, "begin")
        plainly(page, 40)
        other = page.context.new_page()
        other.goto(server.url)
        expect(other.locator(".message")).to_have_count(2)
        ask(page, "left", wait=False)
        page.wait_for_selector(".growing")
        expect(other.locator(".message.user")).to_have_count(2)  # the question is there; its answer comes later
        ask(other, "right", wait=False)
        other.wait_for_selector(".growing")
        for tab in (page, other):
            expect(tab.locator(".growing")).to_have_count(0)
        expect(page.locator(".notice >> text=Another tab has changed")).to_be_visible()
        for tab in (page, other):
            expect(tab.locator("#conversations .entry")).to_have_count(2)
        found = {chat["title"]: chat["messages"] for chat in page.evaluate("probes.conversations()")}
        assert [m["content"] for m in found["begin (2)"] if m["role"] == "user"] == ["begin", "left"]
        assert [m["content"] for m in found["begin"] if m["role"] == "user"] == ["begin", "left", "right"]
        for messages in found.values():
            assert len(messages[-1]["content"]) > 20, "both answers are whole"


def test_two_tabs_have_separate_settings(browser, server):
    with page_of(browser, server.url) as page:
        other = page.context.new_page()
        other.goto(server.url)
        for tab, name in ((page, "temperature"), (other, "min_p"), (page, "top_p")):
            tab.click("#options")
            tab.fill(f"[name={name}]", "0.5")
            tab.click("#options")
        page.reload()
        page.click("#options")
        assert [page.input_value(f"[name={name}]") for name in ("temperature", "min_p", "top_p")] == ["0.5"] * 3


def test_a_running_stream_does_not_restore_a_deleted_conversation(browser):
    with live(step_seconds=0.05) as server, page_of(browser, server.url) as page:
        ask(page, "gone", wait=False)
        page.wait_for_selector(".growing")
        page.once("dialog", lambda dialog: dialog.accept())
        page.click("[aria-label='Delete gone']")
        expect(page.locator("#send")).to_be_visible()
        expect(page.locator("#conversations .entry")).to_have_count(0)
        page.reload()
        expect(page.locator("#conversations .entry")).to_have_count(0)


def test_what_came_of_an_answer_is_kept_when_the_page_is_left(browser):
    with live(step_seconds=0.05) as server, page_of(browser, server.url) as page:
        ask(page, "hello", wait=False)
        expect(page.locator(".message.assistant .markdown")).to_have_text(re.compile("...."))
        page.reload()
        expect(page.locator(".message.assistant .markdown")).to_have_text(re.compile("...."))
        expect(page.locator(".notes")).to_contain_text("Incomplete: the page was left")
        expect(page.locator("text=Regenerate")).to_be_visible()


# -- what there is no room for -----------------------------------------------------------------------------------


def test_a_conversation_without_room_is_offered_as_a_file_until_it_can_be_stored(page, server):
    plainly(page, 5)
    ask(page, "first")
    page.click("#new")
    page.evaluate("probes.fillStorage()")
    ask(page, "second")
    expect(page.locator("#unsaved")).to_be_visible()
    expect(page.locator("#conversations .entry")).to_have_text(["second not saved", "first"])
    page.click("#conversations .entry >> nth=1")  # it is there as long as the page
    page.click("#conversations .entry >> nth=0")
    assert answer(page) == "user:"
    with page.expect_download() as download:
        page.click("#download")
    kept = json.loads(download.value.path().read_text())
    assert [m["content"] for m in kept["messages"]] == ["second", "user:"] and kept["title"] == "second"
    page.once("dialog", lambda dialog: dialog.accept())
    page.evaluate("localStorage.removeItem('full')")
    page.click("[aria-label='Delete first']")
    expect(page.locator("#unsaved")).to_be_hidden()
    expect(page.locator("#conversations .entry")).to_have_text(["second"])
    page.reload()
    assert answer(page) == "user:"


def test_leaving_with_unsaved_data_asks_for_confirmation(page, server):
    page.evaluate("probes.fillStorage()")
    plainly(page, 5)
    ask(page, "hey")
    expect(page.locator("#unsaved")).to_be_visible()
    asked = []
    page.once("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
    page.reload()
    assert asked == ["beforeunload"]
    expect(page.locator(".message")).to_have_count(0)


NO_STORAGE = """
for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
"""


def test_a_browser_without_storage_keeps_conversations_until_the_page_closes(browser, server):
    with page_of(browser, server.url, script=NO_STORAGE) as page:
        plainly(page, 5)
        ask(page, "one")
        ask(page, "two")
        expect(page.locator("#unsaved")).to_be_visible()
        page.click("#new")
        ask(page, "three")
        expect(page.locator("#conversations .entry")).to_have_text([re.compile("three"), re.compile("one")])
        page.click("#conversations .entry >> nth=1")
        expect(page.locator(".message")).to_have_count(4)


# -- what others wrote there -------------------------------------------------------------------------------------

STRANGE = {
    "chat.a": "{broken",
    "chat.b": "5",
    "chat.c": '{"messages": [1, null, {"role": "system", "content": "x"}, {"role": "user", "content": {}}]}',
    "chat.d": '{"title": {}, "updated": "x", "messages": [{"role": "assistant", "content": "kept", "calls": [5],'
    ' "before": [7, {"role": "assistant", "content": "former"}], "usage": 5, "finish": {}}]}',
    "settings": '{"temperature": {}, "stop": 5, "tools": [], "model": 1, "probabilities": "no"}',
}


@pytest.mark.parametrize("name", STRANGE)
def test_damaged_entries_of_the_storage_do_not_break_the_page(page, server, name):
    page.evaluate("([name, value]) => localStorage.setItem(name, value)", [f"kvasir.{name}", STRANGE[name]])
    page.reload()
    if name == "chat.d":
        expect(page.locator(".message.assistant .markdown")).to_have_text("kept")
        page.click("[aria-label='Previous answer']")
        expect(page.locator(".message.assistant .markdown")).to_have_text("former")
    page.click("#new")
    page.click("#options")
    page.click("text=Reset to defaults")
    page.click("#options")
    plainly(page, 5)
    ask(page, "hey")
    assert answer(page) == "user:"
