"""What one does with the page every day, in a real browser: code, formulas, files, searches, names, presets, themes."""

from __future__ import annotations

import json
import re
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

from kvasir.engine.client import FleetScale, ReplicaView
from kvasir.engine.front import Front
from tests.serve.fakes import EchoEngine, byte_tokenizer
from tests.serve.page.browser import NEEDED, answers_with, ask, fill, page_of, stream_of
from tests.serve.running import live, make_front

pytestmark = NEEDED

CODE = 'def f(n):\n    # once\n    return f"{n}" + 1'
TARGETS = "button, select, input:not([type=checkbox]), textarea, summary, label.check"


def shows(page, text: str):
    """The page after an answer with this text."""
    answers_with(page, stream_of({"content": text}))
    ask(page, "hello")
    return page.locator(".message.assistant .markdown")


def test_code_has_the_colours_of_its_language_and_all_its_characters(page):
    text = shows(page, f"```python\n{CODE}\n```\n\n```unheard\n{CODE}\n```\n\n```html\n<b onclick='x()'>&amp;</b>\n```")
    codes = text.locator("pre code")
    expect(codes).to_have_text([CODE, CODE, "<b onclick='x()'>&amp;</b>"])
    expect(codes.nth(0).locator(".h-keyword")).to_have_text(["def", "return"])
    expect(codes.nth(0).locator(".h-comment")).to_have_text("# once")
    expect(codes.nth(1).locator("span")).to_have_count(0)
    expect(codes.nth(2).locator(".h-name")).to_have_text(["b", "b"])
    expect(codes.nth(2).locator("b")).to_have_count(0)


def test_formulas_are_set_and_money_is_not(page):
    text = shows(
        page, "Let $x^2$ and \\(y\\) cost $5 or $10.\n\n$$\n\\frac{a}{b}\n= c\n$$\n\n\\[\n- z\n\\]\n\n`$q$` $\\frac$"
    )
    formulas = text.locator(".math")
    assert [f.get_attribute("aria-label") for f in formulas.all()] == ["x^2", "y", "\\frac{a}{b}\n= c", "- z"]
    expect(text.locator(".display")).to_have_count(2)
    expect(text.locator("p").first).to_contain_text("cost $5 or $10.")
    expect(text.locator("p").last).to_contain_text("$q$ $\\frac$")
    assert page.evaluate("document.fonts.check('16px KaTeX_Main')")


HOSTILE = (
    "\\href{javascript:alert(1)}{x}",
    "\\includegraphics{https://evil.example/x.png}",
    "\\htmlStyle{position:fixed}{x}",
    "\\def\\a{\\a\\a}\\a",
    "\\rule{999999em}{999999em}",
    "\\hspace{-9999em}\\rule{20em}{20em}",
    "{" * 4000,
)


@pytest.mark.parametrize("tex", HOSTILE)
def test_a_hostile_formula_stays_in_its_box(page, tex):
    text = shows(page, f"before\n\n$${tex}$$\n\nafter")
    expect(text.locator("p").last).to_have_text("after")
    expect(text.locator("a, img, [style*=fixed]")).to_have_count(0)
    room = page.locator("#messages").bounding_box()
    for formula in text.locator(".math").all():
        box = formula.bounding_box()
        assert box["x"] >= room["x"] and box["x"] + box["width"] <= room["x"] + room["width"]
        expect(formula).to_have_css("contain", "paint")


def test_text_files_go_along_and_others_are_refused(page):
    bodies = answers_with(page, stream_of({"content": "fine"}), stream_of({"content": "fine"}))
    page.set_input_files(
        "#files",
        [
            {"name": "a.py", "mimeType": "text/plain", "buffer": b"x = '```'\n"},
            {"name": "b.png", "mimeType": "image/png", "buffer": b"\x89PNG\0"},
        ],
    )
    expect(page.locator("#messages .notice")).to_contain_text("b.png is not a text file")
    expect(page.locator("#attached li")).to_have_text(["a.py×"])
    ask(page, "Explain.")
    assert bodies[0]["messages"][-1]["content"] == "Explain.\n\na.py:\n````\nx = '```'\n````"
    expect(page.locator("#attached")).to_be_hidden()
    expect(page.locator(".message.user details")).to_contain_text("a.py")
    page.reload()
    page.click(".message.user button:text('Edit')")
    expect(page.locator("#attached li")).to_have_text(["a.py×"])
    page.click("#attached button")
    ask(page, "Nothing.")
    assert bodies[1]["messages"][-1]["content"] == "Nothing."


def test_conversations_are_found_by_what_they_say_and_can_be_renamed(page):
    for word in ("apple", "banana"):
        page.click("#new")
        shows(page, f"I like the {word} pie.")
        page.unroute("**/v1/chat/completions")
    page.fill("#search", "APPLE")
    expect(page.locator(".entry")).to_have_count(1)
    page.click("[aria-label^=Rename]")
    page.fill(".name", "Fruit")
    page.press(".name", "Enter")
    expect(page.locator(".entry")).to_have_text("Fruit")
    page.fill("#search", "nothing at all")
    expect(page.locator("#nothing")).to_be_visible()
    page.fill("#search", "")
    expect(page.locator(".entry")).to_have_count(2)
    page.locator("[aria-label^=Rename]").last.click()
    page.fill(".name", "other")
    page.press(".name", "Escape")
    page.reload()
    assert "Fruit" in page.locator(".entry").all_inner_texts()
    assert "other" not in page.locator(".entry").all_inner_texts()


def test_presets_keep_the_settings_of_requests(page):
    page.click("#options")
    page.fill("[name=temperature]", "0.3")
    page.fill("[name=system]", "Be brief.")
    page.fill(".presets input", "Brief")
    page.click(".presets button:text('Save')")
    page.select_option(".presets select", "Always the likeliest token")
    expect(page.locator("[name=temperature]")).to_have_value("0")
    expect(page.locator("[name=system]")).to_have_value("")
    expect(page.locator(".presets button:text('Delete')")).to_be_disabled()
    page.reload()
    page.click("#options")
    expect(page.locator("[name=temperature]")).to_have_value("0")
    page.select_option(".presets select", "Brief")
    expect(page.locator("[name=temperature]")).to_have_value("0.3")
    expect(page.locator("[name=system]")).to_have_value("Be brief.")
    page.click(".presets button:text('Delete')")
    assert "Brief" not in page.locator(".presets option").all_inner_texts()


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_theme_is_the_systems_or_the_chosen_one(browser, server, system):
    other = {"light": "dark", "dark": "light"}[system]
    with page_of(browser, server.url, color_scheme=system) as page:
        root = page.locator("html")
        expect(root).to_have_attribute("data-theme", system)
        page.click("#options")
        page.select_option("[name=theme]", other)
        expect(root).to_have_attribute("data-theme", other)
        page.reload()
        expect(root).to_have_attribute("data-theme", other)
        page.emulate_media(color_scheme=other)
        page.click("#options")
        page.select_option("[name=theme]", "")
        page.emulate_media(color_scheme=system)
        expect(root).to_have_attribute("data-theme", system)


def test_a_model_without_a_template_continues_texts(browser):
    front = Front(EchoEngine(), byte_tokenizer(), None)
    with live(front=front) as server, page_of(browser, server.url) as page:
        fill(page, max_tokens="20")
        page.click(".examples button:text('Once upon a time')")
        with page.expect_request("**/v1/completions") as sent:
            page.press("#prompt", "Enter")
        assert json.loads(sent.value.post_data)["prompt"] == "Once upon a time, there was a"
        page.wait_for_selector(".message.assistant[aria-busy=false]")
        first = page.text_content(".message.assistant .markdown")
        assert first
        with page.expect_request("**/v1/completions") as sent:
            ask(page, " and", wait=False)
        prompt = json.loads(sent.value.post_data)["prompt"]
        assert prompt.startswith("Once upon a time, there was a") and prompt.endswith(" and")
        page.wait_for_selector(".message.assistant:last-child[aria-busy=false]")
        expect(page.locator(".message .error")).to_have_count(0)


def test_an_empty_conversation_has_the_models_facts_and_examples(page, server):
    expect(page.locator(".welcome h1")).to_have_text("fake")
    expect(page.locator(".welcome p").first).to_contain_text("context of 512 tokens")
    page.click(".examples button >> nth=1")
    expect(page.locator("#prompt")).to_have_value("What is 23 + 45?")
    shows(page, "68")
    expect(page.locator(".welcome")).to_have_count(0)
    figures = page.locator(".figures")
    assert figures.get_attribute("open") is None
    figures.locator("summary").click()
    expect(figures).to_contain_text("1 token")


@pytest.mark.parametrize("width", [390, 1200])
def test_statistics_open_below_what_opens_them_and_errors_have_none(browser, server, width):
    with page_of(browser, server.url, ("400",), viewport={"width": width, "height": 800}) as page:
        where = "(element) => [element.getBoundingClientRect().x, element.getBoundingClientRect().y]"
        answers_with(page, stream_of({"content": "68"}), {"error": {"message": "It is full."}})
        ask(page, "hello")
        summary = page.locator(".figures summary")
        before = summary.evaluate(where)
        summary.click()
        expect(page.locator(".figures")).to_contain_text("1 token")
        assert summary.evaluate(where) == before
        ask(page, "again")
        expect(page.locator(".message .error")).to_have_text("It is full.")
        expect(page.locator(".figures")).to_have_count(1)


def test_targets_on_a_phone_have_40_pixels(browser, server):
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    with page_of(browser, server.url, **phone) as page:
        shows(page, "```python\nx\n```")
        for open_it in ("#menu", "#menu", "#options"):
            page.click(open_it)
            for target in page.locator(TARGETS).all():
                if target.is_visible():
                    box = target.bounding_box()
                    assert min(box["width"], box["height"]) >= 39.5, (target.evaluate("(e) => e.outerHTML"), box)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


class Replicas(EchoEngine):
    """An engine that reports replicas."""

    scaling = FleetScale(2, 1, 3)
    generated = 0

    @property
    def views(self) -> tuple[ReplicaView, ...]:
        self.generated += 50
        busy = {"running": 3, "waiting": 2, "backlog": 0.25, "predicted": 640, "hit": 600, "blocks_total": 200}
        counts = {"blocks_used": 50, "blocks_cached": 100, "generated_tokens": self.generated, "role": "prefill"}
        dead = {"status": "starting", "reason": "it died", "restarts": 1, "lost": 4}
        return ReplicaView(0, "ready", **busy, **counts), ReplicaView(1, **dead)

    async def restart_replica(self, index: int, grace: float = 0.0) -> None: ...

    async def restart_all(self, grace: float = 0.0) -> None: ...

    async def scale(self, count: int, grace: float = 0.0) -> None: ...


def test_replicas_have_a_row_each(browser):
    with live(front=make_front(Replicas())) as server, page_of(browser, server.url, path="/#engine") as page:
        rows = page.locator(".fleet tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(0).locator("td").nth(4)).to_have_text(re.compile(r"^\d+$"))
        cells = rows.nth(0).locator("td").all_inner_texts()
        assert cells[:4] == ["0 (prefill)", "ready", "3", "2"]
        assert cells[5:] == ["25 %", "50 %", "0.25 s", "640", "600", "0"]
        expect(rows.nth(1).locator("td").nth(1)).to_have_text(re.compile("starting\\s*it died"))
        expect(rows.nth(1)).to_contain_text("1 (4 requests)")
        expect(page.locator(".fleet p")).to_have_text("The load asks for 2 replicas (1 to 3).")


def test_a_server_without_replicas_is_not_asked_for_them(page):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.click("#tab-engine")
    page.wait_for_selector(".tile")
    expect(page.locator(".fleet")).to_be_hidden()
    assert "/fleet" not in [urlsplit(url).path for url in asked]
