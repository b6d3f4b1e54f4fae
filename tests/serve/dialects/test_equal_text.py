"""The same request gives the same text in every dialect, whole and streamed, with the same counts. The engine repeats
its prompt, from the seed on, so the text is known."""

from __future__ import annotations

import json

import pytest

from tests.serve.dialects.table import LENGTH, PATHS, SEED, STOP, TEMPERATURE
from tests.serve.http.test_streams import post, running, wait_until
from tests.serve.running import assert_idle, live

PROMPT = "a prompt with é and 😀 in it, "


@pytest.fixture(scope="module")
def slow():
    with live(step_seconds=0.01) as server:
        yield server


def repeated(row, text: str, length: int) -> str:
    data = row.rendered(text).encode()
    return (data * (1 + length // len(data)))[:length].decode()


async def answer(http, row, stream: bool, text: str = PROMPT, **common):
    response = await http.post(row.path_of(stream), json=row.request(text, stream, **common))
    assert response.status_code == 200, response.text
    return row.read(response.text, stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
class TestText:
    @pytest.mark.few(6)
    async def test_a_greedy_answer_and_its_counts(self, http, row, stream):
        found = await answer(http, row, stream, **{LENGTH: 40}, **row.greedy)
        assert found.text == repeated(row, PROMPT, 40) and found.cut
        assert found.tokens == 40 and found.prompt_tokens in (len(row.rendered(PROMPT).encode()), None)

    @pytest.mark.few(6)
    async def test_a_seed_gives_the_text_that_it_gives_elsewhere(self, http, row, stream):
        other = PATHS["/v1/chat/completions" if row.is_chat else "/v1/completions"]
        asked = {LENGTH: 30, TEMPERATURE: 1.0, SEED: 3}
        found = await answer(http, row, stream, "0123456789", **asked)
        assert found.text == (await answer(http, other, False, "0123456789", **asked)).text

    async def test_a_stop_string_ends_the_text(self, http, row, stream):
        text = "one two three four "
        found = await answer(http, row, stream, text, **{LENGTH: 60, STOP: ["zz", "thr"]}, **row.greedy)
        before = row.rendered(text).split("thr")[0]
        assert found.text == before + ("thr" if row.keeps_stop else "") and not found.cut

    @pytest.mark.few(6)
    async def test_the_context_ends_a_text_that_is_marked_as_cut(self, http, row, stream):
        """No limit is given, or one beyond the context where the field is required."""
        limit = {LENGTH: 400} if row.path == "/v1/messages" else {}
        found = await answer(http, row, stream, "x" * 100, **limit, **row.greedy)
        assert found.cut and found.text == repeated(row, "x" * 100, found.tokens)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_disconnects_ends_its_request(slow, row, stream):
    aborted = slow.ask(slow.front.stats()).aborted
    body = json.dumps(row.request("ab", stream, **{LENGTH: 400})).encode()
    connection = post(slow, row.path_of(stream), body)
    wait_until(lambda: running(slow) == 1, 30)
    if stream:
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    slow.ask(assert_idle(slow.front))
    assert slow.ask(slow.front.stats()).aborted == aborted + 1
