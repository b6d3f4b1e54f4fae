"""The options of operation: what of them reaches the server's settings, and what is refused before a model loads."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.operation import OperationOptions
from kvasir.errors import ConfigError
from kvasir.serve.settings import ServeSettings

GIVEN = {
    "tls_cert": Path("a"),
    "tls_key": Path("b"),
    "tls_ca": Path("c"),
    "access_log": Path("d"),
    "audit_log": Path("e"),
    "data_dir": Path("f"),
    "batch_width": 5,
    "routers": 3,
    "otlp_endpoint": "http://127.0.0.1:4318/v1/traces",
    "otlp_ratio": 0.5,
    "cors_header": ["X-Mine"],
    "cors_method": ["get"],
    "cors_max_age": 7,
    "cors_credentials": True,
    "share_cache": True,
    "trust_request_chat_template": True,
    "ignore_unknown_fields": True,
    "vllm_metrics": True,
    "page": False,
    "reasoning": "off",
    "lora_dir": [Path(__file__).parent],
    "lora_resolve": True,
    "stream_idle_timeout": 7.0,
    "max_connections": 8,
    "max_connections_per_address": 9,
    "trusted_proxy": ["10.0.0.0/8"],
}


OTHERS = ("engine_timeout", "api_workers", "alias")  # of the engine, of processes, of the model's names
SERVER_OPTIONS = [field.name for field in fields(OperationOptions) if field.name not in OTHERS]


@pytest.mark.parametrize("name", SERVER_OPTIONS)
def test_every_option_reaches_the_settings(name):
    plain, given = OperationOptions().settings(), OperationOptions(**{name: GIVEN[name]}).settings()
    changed = {field: value for field, value in given.items() if plain.get(field) != value}
    listed = {"cors_header": ("X-Mine",), "cors_method": ("GET",)}
    listed |= {"trusted_proxy": ("10.0.0.0/8",), "lora_dir": (Path(__file__).parent,), "reasoning": False}
    wanted = listed.get(name, GIVEN[name])
    assert list(changed.values()) == [wanted]
    assert set(given) <= {field.name for field in fields(ServeSettings)}
    ServeSettings(**plain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-cert", "server.crt"], "its key"),
        (["--tls-ca", "ca.crt"], "its key"),
        (["--allowed-origin", "*", "--cors-credentials"], "origin"),
        (["--cors-max-age", "-1"], "cors_max_age"),
        (["--stream-idle-timeout", "-1"], "stream_idle_timeout"),
        (["--max-connections", "0"], "max_connections"),
        (["--batch-width", "0"], "batch_width"),
        (["--engine-timeout", "0"], "engine_timeout"),
        (["--api-workers", "0"], "api_workers"),
        (["--api-server-count", "65"], "api_workers"),
        (["kvasir-mini", "--api-workers", "2"], "several"),
        (["--trusted-proxy", "proxy.example"], "trusted proxy"),
        (["--keys", "absent.json"], "absent.json"),
        (["--host", "0.0.0.0"], "no API key"),
        (["--lora-resolve"], "--lora-dir"),
        (["--lora-dir", "no/such/folder"], "no such folder"),
        (["--lora", "a="], "an adapter is"),
        (["--max-loras", "0"], "max_loras"),
    ],
)
def test_invalid_options_are_refused_before_a_model_is_loaded(options, message):
    result = CliRunner().invoke(app, ["serve", "no/such-model", *options])
    assert isinstance(result.exception, ConfigError) and message in str(result.exception)


def test_files_that_cannot_be_used_are_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps([{"name": "ann", "key": "first-key"}]))
    result = CliRunner().invoke(app, ["serve", "no/such-model", "--keys", str(tmp_path / "keys.json")])
    assert isinstance(result.exception, ConfigError) and "chmod 600" in str(result.exception)
