"""The page's chat in a real browser against a real server, whose model repeats the prompt."""

from __future__ import annotations

import json
import re

import pytest
from playwright.sync_api import expect

from kvasir.serve.settings import ServeSettings
from tests.serve.page.browser import (
    DONE,
    NEEDED,
    answer,
    answers_with,
    ask,
    cable_to,
    fill,
    page_of,
    plainly,
    stream_of,
)
from tests.serve.running import live

pytestmark = NEEDED


# -- messages ----------------------------------------------------------------------------------------------------


def test_an_answer_streams_in_and_is_still_there_after_a_reload(page, server):
    plainly(page, 12)
    ask(page, "hello there")
    assert answer(page) == "user: hello"
    assert "12 tokens" in page.text_content(DONE)
    expect(page.locator("#conversations li")).to_have_count(1)
    page.reload()
    expect(page.locator(".message")).to_have_count(2)
    assert answer(page) == "user: hello"
    assert page.title() == "fake – Kvasir"


def test_a_conversation_continues_and_others_are_listed(page, server):
    plainly(page, 6)
    ask(page, "one")
    ask(page, "two")
    expect(page.locator(".message")).to_have_count(4)
    page.click("#new")
    expect(page.locator(".message")).to_have_count(0)
    ask(page, "three")
    expect(page.locator("#conversations .entry")).to_have_text(["three", "one"])
    page.click("#conversations .entry >> nth=1")
    expect(page.locator(".message.user")).to_have_text([re.compile("one"), re.compile("two")])
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("[aria-label='Delete one']")
    expect(page.locator("#conversations .entry")).to_have_text(["three"])
    expect(page.locator(".message.user")).to_have_text([re.compile("three")])


def test_earlier_turns_are_sent_to_the_model(page, server):
    plainly(page, 60)
    fill(page, system="be kind")
    ask(page, "one")
    first = page.evaluate("probes.conversation()")
    assert first["messages"][1]["content"].startswith("system: be kind\nuser: one\nassistant: ")
    ask(page, "two")
    stored = page.evaluate("probes.conversation()")
    assert stored["messages"][3]["content"].startswith("system: be kind\nuser: one\nassistant: system: be kind")


def test_a_message_that_is_edited_stays_until_it_is_sent_again(page, server):
    plainly(page, 6)
    ask(page, "one")
    ask(page, "two")
    page.click(".message.user >> nth=0 >> text=Edit")
    assert page.input_value("#prompt") == "one"
    expect(page.locator("#editing")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#editing")).to_be_hidden()
    assert page.input_value("#prompt") == ""
    expect(page.locator(".message")).to_have_count(4)
    page.click(".message.user >> nth=0 >> text=Edit")
    page.reload()
    expect(page.locator(".message")).to_have_count(4)
    page.click(".message.user >> nth=0 >> text=Edit")
    ask(page, "three")
    expect(page.locator(".message.user .plain")).to_have_text(["three"])
    expect(page.locator(".message")).to_have_count(2)


def test_answers_that_were_replaced_are_still_there(page, server):
    for tokens in (4, 5, 6):
        plainly(page, tokens)
        if tokens == 4:
            ask(page, "hello")
        else:
            page.click("text=Regenerate")
        expect(page.locator(DONE)).to_contain_text(f"{tokens} tokens")
    foot, text = page.locator(".message.assistant .foot"), page.locator(".message.assistant .markdown")
    expect(foot).to_contain_text("3 of 3")
    expect(page.locator("[aria-label='Next answer']")).to_be_disabled()
    page.click("[aria-label='Previous answer']")
    expect(text).to_have_text("user:")
    page.click("[aria-label='Previous answer']")
    expect(text).to_have_text("user")
    expect(page.locator("[aria-label='Previous answer']")).to_be_disabled()
    page.reload()
    expect(foot).to_contain_text("1 of 3")
    page.click("[aria-label='Next answer']")
    expect(text).to_have_text("user:")
    assert page.evaluate("probes.conversation().messages.length") == 2


def test_a_new_answer_to_an_old_question_asks_before_it_drops_what_followed(page, server):
    plainly(page, 5)
    ask(page, "one")
    ask(page, "two")
    asked = []
    page.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    page.click("text=Regenerate >> nth=0")
    assert asked == ["Regenerating this answer removes the 2 messages after it."]
    expect(page.locator(".message")).to_have_count(4)
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("text=Regenerate >> nth=0")
    expect(page.locator(".message")).to_have_count(2)


def test_stop_ends_the_answer_on_the_server_and_regenerate_makes_another(browser):
    with live(step_seconds=0.05) as server, page_of(browser, server.url) as page:
        ask(page, "hello", wait=False)
        expect(page.locator(".message.assistant .markdown")).to_have_text(re.compile("...."))
        assert server.ask(server.front.stats()).running == 1
        page.keyboard.press("Escape")
        expect(page.locator(".notes")).to_have_text("Stopped.")
        expect(page.locator("#send")).to_be_visible()
        fill(page, temperature="0", max_tokens="5")
        page.click("text=Regenerate")
        expect(page.locator(DONE)).to_contain_text("5 tokens")
        assert answer(page) == "user:"
        expect(page.locator(".message")).to_have_count(2)
        expect(page.locator(".notes")).to_have_text("Cut off: the answer reached its maximum length.")


def test_thoughts_and_tool_calls_are_shown_and_results_go_back(page, server):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city"'}}
    more = {"index": 0, "function": {"arguments": ': "Oslo"}'}}
    streams = [
        stream_of(
            {"reasoning_content": "hm, "},
            {"reasoning_content": "rain?"},
            {"tool_calls": [call]},
            {"tool_calls": [more]},
            finish="tool_calls",
        ),
        stream_of({"content": "It rains."}),
    ]
    bodies = answers_with(page, *streams)
    fill(page, tools='[{"type": "function", "function": {"name": "weather"}}]')
    ask(page, "How is it in Oslo?")
    expect(page.locator(".thoughts")).to_have_text("hm, rain?")
    expect(page.locator(".call figcaption")).to_have_text("Tool call: weather")
    assert json.loads(page.inner_text(".call pre")) == {"city": "Oslo"}
    page.fill("[aria-label='Result of weather']", "wet")
    page.click("text=Send the result")
    expect(page.locator(".message.assistant").last).to_contain_text("It rains.")
    assert bodies[0]["tools"][0]["function"]["name"] == "weather"
    reply = bodies[1]["messages"]
    assert [m["role"] for m in reply] == ["user", "assistant", "tool"]
    assert reply[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]
    assert reply[2] == {"role": "tool", "content": "wet", "tool_call_id": "c1"}


def test_the_pace_is_the_engines_however_the_answer_arrives(browser):
    """All of the answer arrives in one piece, at its end."""
    step = 0.05
    with live(step_seconds=step) as server, page_of(browser, server.url) as page:
        page.route("**/v1/chat/completions", lambda route: route.fulfill(response=route.fetch()))
        plainly(page, 12)
        ask(page, "hello there")
        found = re.search(r"first token after (\d+) ms · ([\d.]+) tokens/s", page.text_content(DONE))
        assert found, page.text_content(DONE)
        assert float(found[1]) >= 1000 * step - 5 and float(found[2]) <= 1 / step + 0.5
        page.reload()
        assert found[0] in page.text_content(DONE)


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_an_error_is_shown_in_the_servers_words(browser, server):
    with page_of(browser, server.url, expected=("status of 400",)) as page:
        ask(page, "x" * 600, wait=False)
        expect(page.locator(".message .error")).to_contain_text("the context holds 512")
        plainly(page, 4)
        page.click("text=Edit")  # the message is written anew, and what failed is gone
        assert page.input_value("#prompt") == "x" * 600
        ask(page, "short")
        assert answer(page) == "user"
        expect(page.locator(".message")).to_have_count(2)


@pytest.mark.parametrize("end", ["", "data: half of an ev", "data: {broken\n\n", "event: x\n\n"])
def test_a_stream_that_breaks_off_is_no_answer(page, server, end):
    chunk = {"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]}
    answers_with(page, f"data: {json.dumps(chunk)}\n\n{end}")
    ask(page, "hello")
    expect(page.locator(".message .error")).to_contain_text("was lost before the answer was complete. Check that")
    assert answer(page) == "half"


def test_a_server_that_goes_and_comes_back(browser):
    expected = ("Failed to load resource", "net::ERR")
    with (
        live(step_seconds=0.02) as server,
        cable_to(server.url) as cable,
        page_of(browser, cable.url, expected=expected) as page,
    ):
        ask(page, "hello", wait=False)
        text = page.locator(".message.assistant .markdown")
        expect(text).to_have_text(re.compile("...."))
        cable.cut()
        error = page.locator(".message .error")
        expect(error).to_contain_text("The connection to the server was lost before the answer was complete.")
        expect(text).to_have_text(re.compile("...."))
        page.click("#tab-engine")
        expect(page.locator("#view-engine > .error")).to_contain_text("The server is not responding. Check that")
        page.click("#tab-chat")
        page.click("text=Regenerate")
        expect(error).to_contain_text("The server is not responding.")
        page.click("[aria-label='Previous answer']")
        expect(text).to_have_text(re.compile("...."))
        cable.mend()
        page.click("#tab-engine")
        expect(page.locator("#view-engine > .error")).to_be_hidden()
        page.click("#tab-chat")
        plainly(page, 5)
        page.click("text=Regenerate")
        expect(text).to_have_text("user:")
        expect(error).to_have_count(0)


@pytest.mark.parametrize(
    ("status", "headers", "body", "words"),
    [
        (429, {"retry-after": "7"}, {"error": {"message": "too much"}}, "too much. Try again in 7 seconds."),
        (503, {"retry-after": "1"}, {"error": {"message": "no (yet)"}}, "no (yet). Try again in 1 second."),
        (403, {}, {"error": {"message": "not you (ask)"}}, "not you (ask)"),
        (502, {}, "<html>", "The server answered with status 502."),
        (200, {}, "data: " + json.dumps({"error": {"message": "it failed"}}) + "\n\n", "it failed"),
    ],
)
def test_a_refusal_states_what_to_do(browser, server, status, headers, body, words):
    with page_of(browser, server.url, expected=(f"status of {status}",)) as page:
        text = body if isinstance(body, str) else json.dumps(body)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=status, headers=headers, body=text))
        ask(page, "hello", wait=False)
        expect(page.locator(".message .error")).to_have_text(words)


# -- settings and the key ------------------------------------------------------------------------------------------


def test_settings_go_into_the_request_and_stay(page, server):
    bodies = []

    def note(route):
        bodies.append(json.loads(route.request.post_data))
        route.continue_()

    page.route("**/v1/chat/completions", note)
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "seed": 3, "max_tokens": 5}
    texts = {"stop": "q\nz", "tools": "[]", "other": '{"service_class": "batch"}'}
    fill(page, **{name: str(value) for name, value in numbers.items()}, **texts)
    page.reload()
    ask(page, "hey")
    body = bodies[0]
    expected = {**numbers, "stop": ["q", "z"], "service_class": "batch", "top_logprobs": 5, "n": 1}
    assert {k: body[k] for k in expected} == expected and "tools" not in body
    assert "seed 3" in page.text_content(DONE)
    page.click("#options")
    page.click("text=Reset to defaults")
    ask(page, "again", wait=False)
    page.wait_for_selector(".message >> nth=3")
    page.keyboard.press("Escape")
    assert bodies[1].keys() == {
        "messages",
        "stream",
        "stream_options",
        "timings_per_token",
        "n",
        "logprobs",
        "top_logprobs",
    }


def test_nothing_is_asked_with_settings_that_are_wrong(page, server):
    plainly(page, 5)
    for name, wrong, words in (
        ("temperature", "101", "Temperature: "),
        ("top_k", "1.5", "Top k: "),
        ("tools", "no list", "Tools: This is not a JSON list."),
        ("other", "[1]", "Other fields: This is not a JSON object."),
    ):
        fill(page, **{name: wrong})
        ask(page, "hey", wait=False)
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator("#settings-error")).to_contain_text(words)
        assert page.evaluate("document.activeElement.name") == name
        page.fill(f"[name={name}]", "")
        expect(page.locator("#settings-error")).to_be_hidden()
        page.click("#options")
    assert page.input_value("#prompt") == "hey"
    expect(page.locator(".message")).to_have_count(0)


def test_the_key_is_asked_for_and_kept_as_long_as_wanted(browser):
    settings = ServeSettings(port=0, api_keys=("a-secret-key",))
    with live(settings) as server, page_of(browser, server.url, expected=("status of 401",)) as page:
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.fill("#key-value", "a-wrong-key")
        page.click("text=Use key")
        expect(page.locator("#key-error")).to_have_text("The server does not accept this key.")
        page.fill("#key-value", "a-secret-key")
        page.press("#key-value", "Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#model")).to_have_text("fake")
        plainly(page, 5)
        ask(page, "hey")
        assert answer(page) == "user:"
        page.reload()
        expect(page.locator("#model")).to_have_text("fake")
        assert page.evaluate("Object.values(localStorage).join().includes('a-secret-key')") is False
        page.click("#key")
        page.click("#key-forget")
        ask(page, "again", wait=False)
        expect(dialog).to_be_visible()
        page.fill("#key-value", "a-secret-key")
        page.check("#key-keep")
        page.click("text=Use key")
        page.wait_for_selector(DONE)  # the message was sent again by itself
        assert page.evaluate("localStorage['kvasir.key']") == "a-secret-key"


def test_the_key_is_asked_for_once_where_the_engine_is_looked_at(browser):
    settings = ServeSettings(port=0, api_keys=("a-secret-key",))
    with live(settings) as server, page_of(browser, server.url, expected=("401",), path="/#engine") as page:
        expect(page.locator("#key-dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#key-dialog")).to_be_hidden()
        expect(page.locator("#view-engine > .error")).to_be_visible()
        page.click("#key")
        page.fill("#key-value", "a-secret-key")
        page.press("#key-value", "Enter")
        expect(page.locator(".tile").first).to_be_visible()
        expect(page.locator("#view-engine > .error")).to_be_hidden()
        expect(page.locator("#model")).to_have_text("fake")
