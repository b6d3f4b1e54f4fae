"""The page in a real browser against a real server, whose model repeats the prompt."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir.serve.settings import ServeSettings
from tests.serve.running import live

pytest.importorskip("playwright", reason="playwright is not installed (it is in the dev extra)")

from playwright.sync_api import Error, Page, expect

from tests.serve.browser import CHROMIUM, MILLISECONDS, WHY_NOT, chromium, page_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]
expect.set_options(timeout=MILLISECONDS)

DONE = ".message.assistant:last-child .figures"


@pytest.fixture(scope="module")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser, server):
    with page_of(browser, server.url) as page:
        yield page


def fill(page: Page, **options: str) -> None:
    """Fills settings in."""
    page.click("#options")
    for name, value in options.items():
        page.fill(f"#settings [name={name}]", value)
    page.click("#options")


def ask(page: Page, text: str, wait: bool = True) -> None:
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    if wait:
        page.wait_for_selector(DONE)


def answer(page: Page) -> str:
    return page.inner_text(".message.assistant:last-child .markdown")


def plainly(page: Page, tokens: int) -> None:
    """Greedy answers of that length: the model repeats the prompt from its beginning."""
    fill(page, temperature="0", max_tokens=str(tokens))


# -- the chat ----------------------------------------------------------------------------------------------------


def test_an_answer_streams_in_and_is_still_there_after_a_reload(page, server):
    plainly(page, 12)
    ask(page, "hello there")
    assert answer(page) == "user: hello"
    assert "12 tokens" in page.inner_text(DONE)
    expect(page.locator("#conversations li")).to_have_count(1)
    page.reload()
    expect(page.locator(".message")).to_have_count(2)
    assert answer(page) == "user: hello"
    assert page.title() == "fake – Kvasir"


def test_a_conversation_goes_on_and_others_stand_beside_it(page, server):
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


def test_what_was_said_before_goes_to_the_model(page, server):
    plainly(page, 60)
    fill(page, system="be kind")
    ask(page, "one")
    first = page.evaluate("probes.conversation()")
    assert first["messages"][1]["content"].startswith("system: be kind\nuser: one\nassistant: ")
    ask(page, "two")
    stored = page.evaluate("probes.conversation()")
    assert stored["messages"][3]["content"].startswith("system: be kind\nuser: one\nassistant: system: be kind")


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
        expect(page.locator(".notes")).to_have_text("Cut off: the answer reached its longest length.")


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


def test_a_stream_that_breaks_off_is_no_answer(page, server):
    chunk = {"choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(chunk)}\n\n"))
    ask(page, "hello")
    expect(page.locator(".message .error")).to_have_text("The connection broke off before the answer was complete.")
    assert answer(page) == "half"


# -- markdown ----------------------------------------------------------------------------------------------------

MARKDOWN = """look

# Title
A **bold** and *leaning* `code` ~~gone~~ [site](https://example.org/a) text.

- one
  - inner
- two

3. three
4. four

| a | b |
|---|--:|
| 1 | **2** |

```python
print("<b>")
```

> quoted

end"""


def test_markdown_is_shown_as_such(page, server):
    plainly(page, len(MARKDOWN) + 6)
    ask(page, MARKDOWN)
    text = page.locator(".message.assistant .markdown")
    expect(text.locator("h3")).to_have_text("Title")
    expect(text.locator("p strong")).to_have_text("bold")
    expect(text.locator("p em")).to_have_text("leaning")
    expect(text.locator("p code")).to_have_text("code")
    expect(text.locator("del")).to_have_text("gone")
    expect(text.locator("a")).to_have_attribute("href", "https://example.org/a")
    expect(text.locator("a")).to_have_attribute("rel", re.compile("noopener"))
    expect(text.locator("ul ul li")).to_have_text("inner")
    expect(text.locator("ol")).to_have_attribute("start", "3")
    expect(text.locator("ol li")).to_have_text(["three", "four"])
    expect(text.locator("th")).to_have_text(["a", "b"])
    expect(text.locator("td strong")).to_have_text("2")
    expect(text.locator("pre code")).to_have_text('print("<b>")')
    expect(text.locator("blockquote")).to_have_text("quoted")
    expect(text.locator("p").last).to_have_text("end")


HOSTILE = (
    '<img src="https://evil.example/x.png" onerror="document.title=1"> <script>document.title=1</script>\n\n'
    "![picture](https://evil.example/y.png) [a](javascript:document.title=1) [b](data:text/html,x) "
    '[c](https://ok.example/"onmouseover=alert(1)) <https://ok.example>'
)


def test_hostile_text_stays_text(browser):
    with live(max_model_len=2000) as server, page_of(browser, server.url) as page:
        plainly(page, len(HOSTILE) + 6)
        ask(page, HOSTILE)
        body = page.locator(".message.assistant")
        assert "<img src=" in answer(page) and "<script>" in answer(page)
        expect(body.locator("img, script, iframe, [onerror], [onmouseover]")).to_have_count(0)
        links = [link.get_attribute("href") for link in body.locator("a").all()]
        assert links and all(link.startswith("https://") for link in links)
        assert page.title() == "fake – Kvasir"


def test_the_policy_forbids_markup_made_of_text(browser, server):
    with page_of(browser, server.url, expected=("TrustedHTML",)) as page, pytest.raises(Error, match="TrustedHTML"):
        page.evaluate("document.body.innerHTML = '<b>x</b>'")


TEXTS = st.text(
    st.sampled_from(list('ab1 .\n\n\t*_`~[]()!#>-+|\\:"/<é😀')) | st.characters(codec="utf-8"), max_size=120
)


def test_any_text_is_drawn_and_each_character_knows_its_place(page):
    @given(TEXTS)
    @settings(max_examples=300)
    def probe(text):
        whole, longer = page.evaluate("(text) => probes.markdown(text)", text)
        assert len(longer) >= len(whole) - 1
        for before, after in zip(whole[:-1], longer, strict=False):  # a block that ended does not change any more
            assert before == after
        letters = "".join(c for _, _, shown in whole for c in shown if c in "ab1é😀")
        assert letters == "".join(c for c in text if c in "ab1é😀")

    probe()


@pytest.mark.parametrize(
    "piece", ["*a ", "**a ", "`a ", "[a", "[a](b", "_a", "> ", "- ", "|a", "~~a ", "https://", "```\n", "\\"]
)
def test_long_hostile_text_is_drawn_in_linear_time(page, piece):
    """Twenty thousand repetitions: a quadratic reader would need minutes."""
    length = page.evaluate("([piece, times]) => probes.repeated(piece, times)", [piece, 20_000])
    assert length <= 20_000 * len(piece) + 20_000


# -- tokens, thoughts, calls -------------------------------------------------------------------------------------


def test_a_token_shows_its_probability_under_the_pointer_and_the_arrow_keys(page, server):
    plainly(page, 11)
    ask(page, "hey né😀")
    assert answer(page) == "user: hey n"
    page.hover(".message.assistant .t >> nth=3")
    card = page.locator("#token-card")
    expect(card).to_be_visible()
    expect(card.locator(".chosen code")).to_have_text("r")
    expect(card.locator(".chosen")).to_contain_text("60.7 %")  # the fake's log-probability is -0.5
    expect(card.locator(".card-row")).to_have_count(6)
    page.mouse.move(0, 0)
    page.focus(".message.assistant .body")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(card.locator(".chosen code")).to_have_text("e")
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_tokens_that_share_a_character_count_as_one(page, server):
    plainly(page, 20)
    ask(page, "né😀.**b**")
    text = "user: né😀.b"
    assert answer(page) == text
    expect(page.locator(".message.assistant .t")).to_have_count(len(text))


def test_no_probabilities_where_none_are_wanted(page, server):
    plainly(page, 6)
    page.click("#options")
    page.uncheck("[name=probabilities]")
    ask(page, "hey")
    assert answer(page) == "user:"
    expect(page.locator(".t")).to_have_count(0)


def stream_of(*deltas: dict, finish: str = "stop") -> str:
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish})
    return "".join(f"data: {json.dumps({'choices': [c]})}\n\n" for c in choices) + "data: [DONE]\n\n"


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
    bodies = []

    def answer_with(route):
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(body=streams[len(bodies) - 1], content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer_with)
    fill(page, tools='[{"type": "function", "function": {"name": "weather"}}]')
    ask(page, "How is it in Oslo?")
    expect(page.locator(".thoughts")).to_have_text("hm, rain?")
    expect(page.locator(".call figcaption")).to_have_text("Tool call: weather")
    assert json.loads(page.inner_text(".call pre")) == {"city": "Oslo"}
    page.fill("[aria-label='Result of weather']", "wet")
    page.click("text=Send the result")
    expect(page.locator(".message.assistant").last).to_contain_text("It rains.")
    assert bodies[0]["tools"][0]["function"]["name"] == "weather"
    said = bodies[1]["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "tool"]
    assert said[1]["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    ]
    assert said[2] == {"role": "tool", "content": "wet", "tool_call_id": "c1"}


def test_settings_go_into_the_request_and_stay(page, server):
    bodies = []

    def note(route):
        bodies.append(json.loads(route.request.post_data))
        route.continue_()

    page.route("**/v1/chat/completions", note)
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "seed": 3, "max_tokens": 5}
    texts = {"stop": "q\nz", "tools": "no list", "other": '{"service_class": "batch"}'}
    fill(page, **{name: str(value) for name, value in numbers.items()}, **texts)
    page.reload()
    ask(page, "hey")
    body = bodies[0]
    expected = {**numbers, "stop": ["q", "z"], "service_class": "batch", "top_logprobs": 5, "n": 1}
    assert {k: body[k] for k in expected} == expected and "tools" not in body
    assert "seed 3" in page.inner_text(DONE)
    page.click("#options")
    expect(page.locator("#json-error")).to_have_text("The tools are no JSON list and are not sent.")
    page.click("text=Back to the defaults")
    ask(page, "again", wait=False)
    page.wait_for_selector(".message >> nth=3")
    page.keyboard.press("Escape")
    assert bodies[1].keys() == {"messages", "stream", "stream_options", "n", "logprobs", "top_logprobs"}


# -- the key -----------------------------------------------------------------------------------------------------


def test_the_key_is_asked_for_and_kept_as_long_as_wanted(browser):
    settings = ServeSettings(port=0, api_keys=("a-secret-key",))
    with live(settings) as server, page_of(browser, server.url, expected=("status of 401",)) as page:
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible()
        page.fill("#key-value", "a-wrong-key")
        page.click("text=Use it")
        expect(page.locator("#key-error")).to_have_text("This key is not known here.")
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
        page.click("text=Use it")
        page.wait_for_selector(DONE)  # the message was sent again by itself
        assert page.evaluate("localStorage['kvasir.key']") == "a-secret-key"


# -- the engine --------------------------------------------------------------------------------------------------


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
        expect(page.locator(".requests tbody")).to_contain_text("Nothing runs and nothing waits.")


def test_nobody_is_asked_when_nobody_looks(page, server):
    seen = []
    page.on("request", lambda request: seen.append(request.url))
    page.click("#tab-engine")
    expect(page.locator(".tile").first).to_be_visible()
    page.click("#tab-chat")
    page.wait_for_timeout(300)
    seen.clear()
    page.wait_for_timeout(1500)
    assert not seen


# -- for everybody -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_screen_in_both_schemes(browser, server, scheme):
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_everything_has_a_name(browser, server, scheme):
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


def test_two_tabs_share_their_conversations(browser, server):
    with page_of(browser, server.url) as page:
        plainly(page, 5)
        other = page.context.new_page()
        other.goto(server.url)
        ask(page, "from the first")
        expect(other.locator("#conversations .entry")).to_have_text(["from the first"])
        ask(other, "from the second")
        expect(page.locator("#conversations .entry")).to_have_count(2)


def test_what_the_storage_holds_may_be_anything(page, server):
    for name, value in (("chat.x", "{broken"), ("chat.y", "5"), ("settings", "[]")):
        page.evaluate("([name, value]) => localStorage.setItem(name, value)", [f"kvasir.{name}", value])
    page.reload()
    plainly(page, 5)
    ask(page, "hey")
    assert answer(page) == "user:"


def test_a_full_storage_is_told(page, server):
    page.evaluate("probes.fillStorage()")
    plainly(page, 5)
    ask(page, "hey", wait=False)
    expect(page.locator(".message.assistant .figures")).to_contain_text("5 tokens")
    expect(page.locator(".notice").first).to_contain_text("no room left")
