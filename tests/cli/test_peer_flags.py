"""vLLM's and llama.cpp's flags for drafters, as users of those engines write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvasir.cli.flags import engine_flags
from kvasir.config import EngineOptions
from kvasir.errors import ConfigError
from kvasir.speculation import LOOKUPS, MAX_DRAFTED, Drafters, parse


def chosen(*arguments: str) -> tuple[EngineOptions, str]:
    """What a command gets from a command line, and the notes that it prints."""
    found: list[EngineOptions] = []
    app = typer.Typer()

    @app.command()
    @engine_flags
    def command(model: str, engine: EngineOptions) -> None:
        found.append(engine)

    result = CliRunner().invoke(app, ["m", *arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0], result.stderr


def vllm(**config: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


@pytest.mark.parametrize(
    "arguments, drafters",
    [
        ((), Drafters(LOOKUPS)),
        (("--spec-type", "none"), Drafters()),
        (("--spec-type", "ngram-simple"), Drafters(("ngram",))),
        (("--spec-type", "ngram-map-k,ngram-map-k4v"), Drafters(("ngram",))),
        (("--spec-type", "ngram-mod"), Drafters(LOOKUPS)),
        (("--spec-type", "ngram-cache"), Drafters(LOOKUPS)),
        (("--spec-type", "draft-mtp"), Drafters(("mtp",))),
        (("--spec-type", "ngram-simple,draft-simple", "-md", "s.gguf"), Drafters(("ngram", "draft"), "s.gguf")),
        (("--spec-type", "draft-eagle3", "--model-draft", "head"), Drafters(("eagle3",), "head")),
        (("-md", "small"), Drafters(("draft",), "small")),
        (("-md", "Qwen3-EAGLE3.gguf"), Drafters(("eagle3",), "Qwen3-EAGLE3.gguf")),
        (("--speculate", "suffix,mtp"), Drafters(("suffix", "mtp"))),
        (vllm(method="ngram", prompt_lookup_max=4), Drafters(("ngram",))),
        (vllm(method="suffix"), Drafters(LOOKUPS)),
        (vllm(method="draft_model", model="a/b"), Drafters(("draft",), "a/b")),
        (vllm(method="eagle3", model="a/b"), Drafters(("eagle3",), "a/b")),
        (vllm(model="a/b"), Drafters(("draft",), "a/b")),
        (vllm(model="a/EAGLE3-b"), Drafters(("eagle3",), "a/EAGLE3-b")),
        (vllm(method="mtp"), Drafters(("mtp",))),
        (vllm(method="qwen3_next_mtp", model="x"), Drafters(("mtp",))),
    ],
)
def test_drafters_of_other_engines_are_ours(arguments, drafters):
    assert parse(chosen(*arguments)[0].speculate) == drafters


@pytest.mark.parametrize("flag", ["--draft-max", "--draft", "--draft-n", "--spec-draft-n-max"])
def test_the_number_of_drafted_ids_has_llamacpps_names(flag):
    assert chosen(flag, "5")[0].draft_max == 5


def test_vllms_number_of_drafted_ids_is_within_ours():
    assert chosen(*vllm(method="ngram", num_speculative_tokens=5)) == (
        EngineOptions("m", speculate="ngram", draft_max=5),
        "",
    )
    options, notes = chosen(*vllm(method="ngram", num_speculative_tokens=64))
    assert options.draft_max == MAX_DRAFTED and "64" in notes


def test_settings_without_effect_are_noted():
    _, notes = chosen("--draft-min", "2", "--draft-p-min", "0.5")
    assert "--draft-min" in notes and "--draft-p-min" in notes
    _, notes = chosen(*vllm(method="ngram", prompt_lookup_max=4, prompt_lookup_min=2))
    assert "prompt_lookup_max, prompt_lookup_min" in notes
    assert "other checkpoint" in chosen(*vllm(method="mtp", model="x"))[1]


@pytest.mark.parametrize(
    "arguments, named",
    [
        (vllm(method="medusa", model="x"), "draft_model"),
        (vllm(method="eagle", model="x"), "eagle3"),
        (vllm(method=["ngram"]), "ngram"),
        (vllm(method="eagle3"), "needs a model"),
        (vllm(num_speculative_tokens=3), "neither method nor model"),
        (vllm(method="ngram", num_speculative_tokens=0), "num_speculative_tokens"),
        (vllm(method="ngram", depth=3), "depth"),
        (vllm(method="draft_model", model=3), "expected a name"),
        (("--speculative-config", "ngram"), "not JSON"),
        (("--speculative-config", "[1]"), "not an object"),
        ((*vllm(method="ngram"), "--speculate", "off"), "give one of them"),
        ((*vllm(method="ngram"), "-md", "x"), "give one of them"),
        (("--spec-type", "draft-dflash", "-md", "x"), "draft-dflash"),
        (("--spec-type", "draft-simple"), "give -md FILE"),
        (("--spec-type", "ngram-simple", "-md", "x"), "draft-simple"),
    ],
)
def test_what_is_not_known_is_refused_by_name(arguments, named):
    with pytest.raises(ConfigError) as caught:
        chosen(*arguments)
    assert named in f"{caught.value.message} {caught.value.hint}"


def test_a_draft_model_on_this_machine_is_judged_by_its_config(tmp_path):
    for name, architecture, method in (
        ("eagle3-named", "LlamaForCausalLM", "draft"),
        ("b", "Eagle3LlamaForCausalLM", "eagle3"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert chosen("-md", str(folder))[0].speculate == f"{method}={folder}"
