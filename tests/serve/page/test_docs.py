"""The API's page: what it shows is the server's own schema, and every field of it has its meaning there."""

from __future__ import annotations

import pytest

from kvasir.serve.settings import ServeSettings
from tests.serve.running import client, live, make_front


async def test_the_schema_says_what_fields_mean(http):
    schema = (await http.get("/openapi.json")).json()
    schemas = schema["components"]["schemas"]
    [chat] = [one for name, one in schemas.items() if name.endswith("openai__wire__ChatRequest")]
    assert "conversation" in chat["properties"]["messages"]["description"]
    described = [
        bool(about.get("description"))
        for name, one in schemas.items()
        if "Request" in name
        for about in one.get("properties", {}).values()
    ]
    assert len(described) > 300 and sum(described) > 0.7 * len(described)


async def test_the_page_of_the_api_is_open_and_strict():
    async with client(ServeSettings(api_keys=("a-key-of-mine",))) as http:
        page = await http.get("/docs")
        assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
        assert (await http.get("/openapi.json")).status_code == 401


browser = pytest.importorskip("tests.serve.page.browser", reason="playwright is not installed")


@pytest.mark.slow
@pytest.mark.skipif(browser.CHROMIUM is None, reason=browser.WHY_NOT)
def test_routes_and_fields_are_found():
    settings = ServeSettings(port=0, api_keys=("a-key-of-mine",))
    with (
        live(settings, make_front()) as server,
        browser.chromium() as chromium,
        browser.page_of(chromium, server.url, expected=("401",), path="/docs") as page,
    ):
        page.get_by_label("API key").fill("a-key-of-mine")
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("Search routes and fields").fill("guided_regex")
        shown = page.locator("#routes details:visible")
        shown.first.wait_for()
        assert "/v1/chat/completions" in page.inner_text("#routes")
        page.get_by_text("/v1/chat/completions", exact=True).click()
        page.get_by_text("structured_outputs.regex").first.wait_for()
        assert "/v1/files" not in page.inner_text("#routes")
