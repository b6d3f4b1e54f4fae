"""The sampler's options of `kvasir run` and `kvasir chat`."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.sampler import NUMBERS, SamplerOptions
from kvasir.errors import ConfigError
from kvasir.types import SamplingParams


def test_options_are_fields_of_the_params(tmp_path):
    assert SamplerOptions().params() == {}
    given = SamplerOptions(top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.2).params()
    assert given == {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2}
    known = {f.name for f in fields(SamplingParams)}
    assert {f.name for f in fields(SamplerOptions)} - {"json_schema", "grammar"} <= set(NUMBERS) <= known


def test_files_that_cannot_be_followed_are_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"type": "integer"}')
    (tmp_path / "b").write_text("")
    (tmp_path / "c").write_bytes(b"\xff")
    (tmp_path / "d").write_text("x" * (1 << 21))
    good = tmp_path / "a.json"
    assert SamplerOptions(json_schema=good).params()["structured_outputs"].json == {"type": "integer"}
    with pytest.raises(ConfigError, match=r"--json-schema.*--grammar"):
        SamplerOptions(json_schema=good, grammar=good).params()
    for name in "bcde":
        with pytest.raises(ConfigError):
            SamplerOptions(json_schema=tmp_path / name).params()


@pytest.mark.parametrize("command", ["run", "chat"])
def test_help_names_every_sampler_option(command):
    reported = CliRunner().invoke(app, [command, "--help"]).output
    assert all(f"--{f.name.replace('_', '-')}"[:16] in reported for f in fields(SamplerOptions))


@pytest.mark.parametrize("chat", [("--no-chat",), ()])
def test_an_answer_follows_a_schema(tmp_path, chat):
    (tmp_path / "a.json").write_text('{"enum": ["left", "right"]}')
    options = ["--json-schema", str(tmp_path / "a.json"), "--temperature", "1", "--top-p", "0.9", "--quiet", *chat]
    result = CliRunner().invoke(
        app, ["run", "kvasir-mini", "Which way?", "--max-tokens", "60", "--seed", "3", *options]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.split("</think>")[-1]) in ("left", "right")
