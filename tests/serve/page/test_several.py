"""The page of a server of several models, in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import expect

from kvasir.errors import ModelFileError
from kvasir.serve.auth.keys import Key, KeyScope
from kvasir.serve.hosting.model_manager import ModelManager
from kvasir.serve.settings import ServeSettings
from tests.serve.page.browser import NEEDED, answer, ask, page_of
from tests.serve.running import live_on
from tests.serve.shelf import Launcher, Shelf, offer

pytestmark = NEEDED


@contextmanager
def several(*names: str, keys: tuple[Key, ...] = ()) -> Iterator[tuple[str, Launcher, Shelf]]:
    """Its address, what it launches, and what it has."""
    launcher, shelf, settings = Launcher(), Shelf([offer(name) for name in names]), ServeSettings(port=0, keys=keys)
    with live_on(lambda: ModelManager(shelf, launcher, settings)) as server:
        yield server.url, launcher, shelf


def test_the_model_that_is_chosen_answers_and_is_looked_at(browser):
    with several("first", "second") as (url, launcher, _), page_of(browser, url, expected=("503",)) as page:
        expect(page.locator("#models")).to_be_visible()
        expect(page.locator("#model")).to_be_hidden()
        page.select_option("#models", "second")
        expect(page).to_have_title("second – Kvasir")
        ask(page, "hello")
        assert "user: hello" in answer(page)
        expect(page.locator(".figures")).to_contain_text("second")
        assert launcher.there == ["second"]
        page.click("#tab-engine")
        expect(page.locator("#view-engine")).to_contain_text("one answer")
        page.select_option("#models", "first")
        expect(page.locator("#view-engine > .error")).to_contain_text("no model is loaded")
        expect(page.locator(".tile").first).to_be_hidden()  # which is another model's
        assert launcher.there == ["second"], "looking loads nothing"
        page.select_option("#models", "second")
        expect(page.locator(".tile").first).to_be_visible()
        page.reload()
        expect(page.locator("#models")).to_have_value("second")


def test_models_are_loaded_and_unloaded(browser):
    with several("first", "second") as (url, launcher, _), page_of(browser, url, expected=("503", "400")) as page:
        page.click("#tab-engine")
        rows = page.locator("#view-engine > .panel tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.nth(1)).to_contain_text("not loaded")
        page.click("[aria-label='Load second']")
        expect(rows.nth(1)).to_contain_text("MiB, until")
        assert launcher.there == ["second"]
        page.click("[aria-label='Unload second']")
        expect(rows.nth(1)).to_contain_text("not loaded")
        assert launcher.there == []
        launcher.failing["first"] = ModelFileError("it is broken", "mend it")
        page.click("[aria-label='Load first']")
        expect(page.locator("#view-engine > .panel .error")).to_contain_text("cannot be loaded: it is broken (mend it)")
        expect(page.locator("[aria-label='Load first']")).to_be_enabled()


def test_the_list_of_models_follows_what_the_server_offers(browser):
    with (
        several("first", "second") as (url, _, shelf),
        page_of(browser, url, expected=("503", "404"), path="/#engine") as page,
    ):
        rows = page.locator("#view-engine > .panel tbody tr")
        expect(rows).to_have_count(2)
        page.select_option("#models", "second")
        page.click("[aria-label='Load second']")
        expect(page.locator("#view-engine")).to_contain_text("second · context of 512 tokens")
        shelf.set(offer("third"))
        expect(rows).to_have_count(3)
        expect(page.locator("#models")).to_have_value("second")
        shelf.remove("second")
        expect(rows).to_have_count(2)
        expect(page.locator("#models")).to_have_value("first")
        page.click("#tab-chat")
        page.select_option("#models", "third")
        shelf.remove("third")
        ask(page, "hello", wait=False)
        expect(page.locator(".message .error")).to_contain_text("the model 'third' does not exist")
        expect(page.locator("#model")).to_have_text("first")


def test_only_a_key_with_the_management_scope_unloads(browser):
    user = Key("a-users-key", "user")
    manager = Key("a-managers-key", "manager", scopes=frozenset({KeyScope.INFERENCE, KeyScope.MANAGEMENT}))
    expected = ("401", "403", "503")
    with several("first", "second", keys=(user, manager)) as (url, launcher, _):
        for secret in ("a-users-key", "a-managers-key"):
            with page_of(browser, url, expected=expected, path="/#engine") as page:
                page.fill("#key-value", secret)
                page.press("#key-value", "Enter")
                if not launcher.there:
                    page.click("[aria-label='Load first']")
                unload = page.locator("[aria-label='Unload first']")
                if secret == "a-users-key":
                    expect(unload).to_be_disabled()
                    assert "needs a key with the scope 'management'" in (unload.get_attribute("title") or "")
                    # In one task, before the page draws the table again: the server does not rely on the page.
                    unload.evaluate("(button) => { button.disabled = false; button.click(); }")
                    words = "this needs a key with the scope 'management' (scopes are set in the --keys file)"
                    expect(page.locator("#view-engine > .panel .error")).to_have_text(words)
                    assert launcher.there == ["first"]
                else:
                    unload.click()
                    expect(page.locator("[aria-label='Load first']")).to_be_enabled()
                    assert launcher.there == []


def test_a_server_of_one_model_or_none_shows_no_choice_of_models(browser):
    with several("only") as (url, _, _), page_of(browser, url, expected=("503",)) as page:
        expect(page.locator("#model")).to_have_text("only")
        expect(page.locator("#models")).to_be_hidden()
    with several() as (url, _, _), page_of(browser, url) as page:
        expect(page.locator("#models")).to_be_visible()
        expect(page).to_have_title("Kvasir")
