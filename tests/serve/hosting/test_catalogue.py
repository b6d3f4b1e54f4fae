"""Leases, and errors in the shape of the dialect."""

from __future__ import annotations

import pytest

from tests.serve.running import client


@pytest.mark.parametrize(
    ("path", "headers", "place"),
    [
        ("/v1/chat/completions", {}, ("error", "message")),
        ("/v1/messages", {}, ("error", "message")),
        ("/v1/models/unknown", {"anthropic-version": "2023-06-01"}, ("error", "message")),
        ("/api/nothing", {}, ("error",)),
    ],
)
async def test_an_error_has_the_shape_of_its_dialect(http, path, headers, place):
    response = await http.get(path, headers=headers)
    assert response.status_code in (404, 405)
    error = response.json()
    assert ("type" in error) == ("messages" in path or bool(headers))
    for step in place:
        error = error[step]
    assert isinstance(error, str)


async def test_a_model_of_another_name_is_not_found():
    async with client() as http:
        response = await http.post("/v1/completions", json={"model": "other", "prompt": "x"})
        assert response.status_code == 404 and "served: " in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "model"
