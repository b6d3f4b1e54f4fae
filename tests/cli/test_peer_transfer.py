"""vLLM's --kv-transfer-config."""

from __future__ import annotations

import json

import pytest

from kvasir.cli.peer_flags import PeerFlags, with_peer_flags
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError


def options_of(text: str, **options) -> tuple[EngineOptions, list[str]]:
    return with_peer_flags(EngineOptions("m", **options), PeerFlags(kv_transfer_config=text))


@pytest.mark.parametrize(("role", "ours"), [("kv_both", "both"), ("kv_producer", "prefill"), ("kv_consumer", "decode")])
def test_roles(role, ours):
    found, notes = options_of(json.dumps({"kv_connector": "NixlConnector", "kv_role": role}))
    assert found.role == ours and found.transfer_listen is None
    assert "kv_connector" in notes[0]


def test_an_address_unless_there_is_one():
    text = json.dumps({"kv_role": "kv_producer", "kv_ip": "10.0.0.1", "kv_port": 7000})
    assert options_of(text)[0].transfer_listen == "10.0.0.1:7000"
    assert options_of(text, transfer_listen="/run/kv/blocks")[0].transfer_listen == "/run/kv/blocks"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ("[]", "expected an object"),
        ("{", "not valid JSON"),
        ('{"kv_role": "other"}', "kv_producer"),
        ('{"kv_role": 1}', "kv_producer"),
        ('{"unknown": 1}', "unknown"),
        ('{"kv_ip": "10.0.0.1"}', "belong together"),
        ('{"kv_ip": 1, "kv_port": 2}', "belong together"),
    ],
)
def test_malformed_configs_are_refused(text, message):
    with pytest.raises(ConfigError) as error:
        options_of(text)
    assert message in f"{error.value} {error.value.hint}"
