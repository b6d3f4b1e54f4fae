"""bench grammar: every grammar compiles and comes to answers, which are the same each time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvasir
from kvasir.cli.app import app
from kvasir.cli.bench.grammar import measure
from kvasir.cli.bench.grammars import SCHEMAS, grammars
from kvasir.errors import ConfigError
from tests.text.vocabularies import local_folder

MINI = Path(kvasir.__file__).parent / "assets" / "kvasir-mini"


@pytest.mark.slow
def test_the_command_writes_what_it_shows(tmp_path):
    options = ["--tokenizer-folder", str(MINI), "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["bench", "grammar", "kvasir-mini", *options])
    assert result.exit_code == 0, result.output
    assert "kvasir-mini" in result.output and f"{len(grammars())} grammars" in result.output
    reported = json.loads(next(tmp_path.glob("grammar-*.json")).read_text())["tokenizers"]["kvasir-mini"]
    assert set(reported["grammars"]) == set(grammars()) > set(SCHEMAS)
    for one in reported["grammars"].values():
        assert 0 < one["compile_s"]["p50"] <= one["compile_s"]["max"] and one["drawn"] + one["forced"]
    assert 0 < reported["mask_s"]["p50"] <= reported["mask_s"]["p99"] <= reported["mask_s"]["max"]
    assert 0 < reported["forced_share"] < 1


def test_answers_are_drawn_from_a_seed():
    tokenizer = local_folder(MINI)
    first, again = (measure(tokenizer, 2)["grammars"] for _ in range(2))
    for name, one in first.items():
        assert (one["drawn"], one["forced"]) == (again[name]["drawn"], again[name]["forced"]), name


def test_a_model_or_a_tokenizer_is_needed():
    result = CliRunner().invoke(app, ["bench", "grammar"])
    assert isinstance(result.exception, ConfigError) or "needs a model" in result.output


def test_the_help_has_an_example():
    assert "bench grammar kvasir-mini" in CliRunner().invoke(app, ["bench", "--help"]).output
