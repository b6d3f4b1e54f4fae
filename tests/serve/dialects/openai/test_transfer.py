"""vLLM's kv_transfer_params: what they ask of the engine, what is answered, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvasir.errors import InvalidRequest
from kvasir.serve.dialects.openai.transfer import TransferParams, transfer_fields, transfer_object
from kvasir.types import ModelInfo, Request, SamplingParams, Task
from tests.serve.running import client

INFO = ModelInfo(
    "m", "a", (Task.GENERATE,), 300, 512, role="both", engine_id="me", transfers_at="10.0.0.1:7000", block_size=16
)


def fields(info: ModelInfo = INFO, stream: bool = False, prompts: int = 1, **params):
    return transfer_fields(TransferParams(**params), info, stream, prompts)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [("10.0.0.1:7000", "10.0.0.1", 7000), ("[::1]:7000", "::1", 7000), ("/run/kv/blocks", "/run/kv/blocks", 0)],
)
def test_what_the_first_server_answers_the_second_understands(address, host, port):
    first = replace(INFO, transfers_at=address)
    core = Request("r", tuple(range(40)), SamplingParams(seed=0), **fields(first, do_remote_decode=True))
    answer = transfer_object(core, first)["kv_transfer_params"]
    assert core.sends and not core.sends.address
    assert (answer["remote_host"], answer["remote_port"], answer["remote_block_ids"]) == (host, port, [0, 1])
    takes = fields(replace(INFO, engine_id="other"), **answer)["takes"]
    assert (takes.id, takes.address) == (core.sends.id, address)
    assert fields(first, **answer) == {}, "its own blocks are in its prefix cache"


def test_blocks_that_are_pushed_are_not_fetched():
    core = Request("r", (1,), SamplingParams(seed=0), **fields(do_remote_decode=True, remote_host="h", remote_port=5))
    assert core.sends and core.sends.address == "h:5"
    answer = transfer_object(core, INFO)["kv_transfer_params"]
    assert fields(replace(INFO, engine_id="other"), **answer)["takes"].address == ""


def test_ids_of_transfers_cannot_be_guessed():
    assert len({fields(do_remote_decode=True)["sends"].id for _ in range(100)}) == 100
    assert len(fields(do_remote_decode=True)["sends"].id) == 32


def test_params_that_ask_for_nothing_are_ignored():
    assert fields(remote_host="h", remote_block_ids=[[1], "x"]) == fields(do_remote_prefill=False) == {}
    assert transfer_fields(None, INFO, False) == transfer_object(Request("r", (1,), SamplingParams()), INFO) == {}


@pytest.mark.parametrize(
    ("params", "given", "message"),
    [
        ({"do_remote_decode": True, "do_remote_prefill": True}, {}, "exclude each other"),
        ({"do_remote_decode": True}, {"stream": True}, "streamed"),
        ({"do_remote_decode": True}, {"prompts": 2}, "2 prompts"),
        ({"do_remote_decode": True}, {"info": replace(INFO, transfers_at="")}, "--transfer-listen"),
        ({"do_remote_decode": True}, {"info": replace(INFO, role="")}, "--role"),
        ({"do_remote_prefill": True}, {}, "remote_request_id"),
        ({"do_remote_prefill": True, "remote_request_id": "x", "remote_host": "h"}, {}, "remote_port"),
    ],
)
def test_what_cannot_be_is_refused(params, given, message):
    with pytest.raises(InvalidRequest) as error:
        fields(**given, **params)
    assert message in f"{error.value} {error.value.hint}" and error.value.param == "kv_transfer_params"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    "params",
    [5, "x", [], {"do_remote_decode": 1}, {"remote_port": 70000}, {"remote_host": "h" * 2000}, {"remote_port": "1"}],
)
async def test_malformed_params_are_the_clients_fault(path, params):
    body = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    async with client() as http:
        response = await http.post(f"/v1/{path}", json={**body, "kv_transfer_params": params})
        assert response.status_code == 400 and "kv_transfer_params" in response.text
        response = await http.post(f"/v1/{path}", json={**body, "kv_transfer_params": {"do_remote_decode": True}})
        assert response.status_code == 400 and "exchanges no blocks" in response.text
