"""What a model says, on the page in a real browser: markdown, hostile text, tokens, thoughts and tool calls."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from playwright.sync_api import Error, expect

from tests.serve.page.browser import NEEDED, answer, answers_with, ask, fill, page_of, plainly, stream_of
from tests.serve.running import live

pytestmark = NEEDED

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


def test_the_policy_lets_the_page_ask_its_own_server_alone(browser, server):
    """Whatever a script tried: another origin, even on this machine, hears nothing. (A browser may connect before it
    has read the policy; then it sends nothing.)"""
    heard: list[bytes] = []

    def listen(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with listener.accept()[0] as connection:
                    connection.settimeout(1)
                    heard.append(connection.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, args=(listener,), daemon=True).start()
        other = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with page_of(browser, server.url, expected=("csp", "Content Security Policy")) as page:
            refused = page.evaluate("(url) => probes.reachElsewhere(url)", other)
        assert refused == [
            "connect-src",
            "connect-src",
            "connect-src",
            "font-src",
            "frame-src",
            "img-src",
            "script-src-elem",
        ]
        listener.shutdown(socket.SHUT_RDWR)
    assert not any(heard)


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
    "piece",
    [
        *("*a ", "**a ", "`a ", "[a", "[a](b", "_a", "> ", "- ", "|a", "~~a ", "https://", "```\n", "\\"),
        *("|-", "- x\n\n", "1. ", "  - a\n", "**_", "![a](", "<", "# ", "- - ", "~~~\n> ", "a\n\n", "\u202e`"),
    ],
)
def test_long_hostile_text_is_drawn_in_linear_time(page, piece):
    """Twenty thousand repetitions: a quadratic reader would need minutes."""
    length = page.evaluate("([piece, times]) => probes.repeated(piece, times)", [piece, 20_000])
    assert length <= 20_000 * len(piece) + 20_000


def test_a_table_is_as_wide_as_its_text(page):
    """Twenty thousand columns and as many rows of one cell: rows that were filled up would have 4e8 cells."""
    many = 20_000
    text = "|a" * many + "\n" + "|-" * many + "\n" + "|x\n" * many
    assert page.evaluate("(text) => probes.repeated(text, 1)", text) == 2 * many


def test_a_row_with_more_cells_than_its_head_shows_them_all(page):
    [[_, markup, _]], _ = page.evaluate("(text) => probes.markdown(text)", "|a|\n|-|\n|1|2|3|")
    assert re.findall(r"<td[^>]*>(.*?)</td>", markup) == ["1", "2", "3"]


def test_direction_marks_do_not_reorder_the_text_beside_them(page):
    """A mark that overrides the direction, in a paragraph, a link and code."""
    turn = "\u202e"
    text = f"a{turn}b\n\n- c{turn}d\n\n`e{turn}f` [g{turn}h](https://example.org)\n\n```\ni{turn}j\n```"
    answers_with(page, stream_of({"content": text}))
    ask(page, "turn")
    for selector, direction in {"p": "plaintext", "li": "plaintext", "a": "isolate"}.items():
        first = page.locator(f".message.assistant {selector}").first
        expect(first).to_have_css("unicode-bidi", direction)
    for code, text in ((":not(pre) > code", "ef"), ("pre code", "ij")):
        expect(page.locator(f".message.assistant {code}")).to_have_text(text)
        expect(page.locator(f".message.assistant {code} .control")).to_have_attribute("data-code", "U+202E")


def test_code_without_an_end_grows_as_it_comes(page, server):
    text = "```python\n" + "".join(f"x{i} = {i}\n" for i in range(400))
    answers_with(page, stream_of(*({"content": text[i : i + 50]} for i in range(0, len(text), 50)), finish="length"))
    ask(page, "code")
    assert page.inner_text(".message.assistant pre").splitlines()[-1] == "x399 = 399"
    expect(page.locator(".message.assistant pre")).to_have_count(1)


# -- tokens ------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def drafting(browser):
    """The page of a server that drafts what a request predicts."""
    with live(drafts=True) as server, page_of(browser, server.url) as page:
        yield page


def test_drafted_tokens_are_marked_where_wanted(drafting):
    page = drafting
    fill(page, temperature="0", max_tokens="11", other='{"prediction": {"type": "content", "content": "user:!hey"}}')
    ask(page, "hey né😀")
    assert answer(page) == "user: hey n"
    marked = page.locator(".message.assistant .t-drafted")
    expect(marked).to_have_text([*"ser:hey"])  # the first and the corrected one are sampled
    expect(page.locator(".message.assistant .figures")).to_contain_text("drafts right")
    clear = "rgba(0, 0, 0, 0)"
    expect(marked.first).to_have_css("background-color", clear)
    page.click("#options")
    page.check("[name=drafts]")
    expect(marked.first).not_to_have_css("background-color", clear)
    marked.first.hover()
    expect(page.locator("#token-card")).to_contain_text("Drafted")


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
