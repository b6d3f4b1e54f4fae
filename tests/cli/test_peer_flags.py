"""vLLM's and llama.cpp's flags for drafters, as users of those engines write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvasir.cli.flags import engine_flags
from kvasir.config import EngineOptions, check
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
        (("--spec-type", "draft-dflash", "-md", "a"), Drafters(("dflash",), "a")),
        (("--spec-type", "draft-dspark", "-md", "a"), Drafters(("dflash",), "a")),
        (vllm(method="dspark", model="a/dspark_qwen3_4b"), Drafters(("dflash",), "a/dspark_qwen3_4b")),
        (("-md", "a/dspark_qwen3_4b_block7"), Drafters(("dflash",), "a/dspark_qwen3_4b_block7")),
        (("-md", "Qwen3-8B-DFlash"), Drafters(("dflash",), "Qwen3-8B-DFlash")),
        (vllm(method="dflash", model="a/b"), Drafters(("dflash",), "a/b")),
        (("-md", "small"), Drafters(("draft",), "small")),
        (("-md", "Qwen3-EAGLE3.gguf"), Drafters(("eagle3",), "Qwen3-EAGLE3.gguf")),
        (("--speculate", "suffix,mtp"), Drafters(("suffix", "mtp"))),
        (vllm(method="ngram", prompt_lookup_max=4), Drafters(("ngram",))),
        (vllm(method="suffix"), Drafters(LOOKUPS)),
        (vllm(method="draft_model", model="a/b"), Drafters(("draft",), "a/b")),
        (vllm(method="eagle3", model="a/b"), Drafters(("eagle3",), "a/b")),
        (vllm(model="a/b"), Drafters(("draft",), "a/b")),
        (vllm(model="a/EAGLE3-b"), Drafters(("eagle3",), "a/EAGLE3-b")),
        (("-hfd", "a/b"), Drafters(("draft",), "a/b")),
        (("--spec-method", "ngram"), Drafters(("ngram",))),
        (("--spec-method", "eagle3", "--spec-model", "a/b", "--spec-tokens", "3"), Drafters(("eagle3",), "a/b")),
        (("--spec-model", "a/b", "--spec-tokens", "3"), Drafters(("draft",), "a/b")),
        (("--spec-tokens", "3"), Drafters(LOOKUPS)),
        (vllm(method="mtp"), Drafters(("mtp",))),
        (vllm(method="qwen3_next_mtp", model="x"), Drafters(("mtp",))),
        (vllm(method="mtp", model="a/gemma-4-assistant"), Drafters(("draft",), "a/gemma-4-assistant")),
        (("--spec-type", "draft-mtp", "-md", "a-assistant"), Drafters(("draft",), "a-assistant")),
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


@pytest.mark.parametrize(
    "arguments, own",
    [
        (("--speculate", "draft=s", "--draft-dtype", "float32", "--draft-quantize", "q4"), ("float32", "q4", None)),
        (("-md", "s", "--draft-max-model-len", "512"), (None, None, 512)),
        (("-md", "s", "-cd", "512"), (None, None, 512)),
        (("-md", "s", "--ctx-size-draft", "0"), (None, None, None)),
        (("-md", "s", "-ctkd", "q8_0", "--cache-type-v-draft", "q8_0", "--kv-dtype", "int8"), (None, None, None)),
        (vllm(model="a/b", max_model_len=512, kv_cache_dtype="auto"), (None, None, 512)),
        (vllm(method="ngram", max_model_len=512), (None, None, None)),
    ],
)
def test_a_drafter_has_options_of_its_own(arguments, own):
    options, _ = chosen(*arguments)
    check(options)
    assert (options.draft_dtype, options.draft_quantize, options.draft_max_model_len) == own


@pytest.mark.parametrize(
    "own, named",
    [
        ({"draft_dtype": "int8"}, "float16"),
        ({"draft_quantize": "q5"}, "q8, q4, none"),
        ({"draft_max_model_len": 0}, "at least 1"),
        ({"draft_dtype": "float32", "speculate": "mtp"}, "without such a drafter"),
        ({"draft_quantize": "q8", "speculate": "auto"}, "draft=MODEL, eagle3=PATH"),
        ({"draft_max_model_len": 9, "speculate": "ngram"}, "without a drafter that has weights"),
    ],
)
def test_options_of_a_drafter_are_checked(own, named):
    with pytest.raises(ConfigError) as caught:
        check(EngineOptions("m", **{"speculate": "draft=s", **own}))
    assert named in f"{caught.value.message} {caught.value.hint}"


def test_settings_without_effect_are_noted():
    _, notes = chosen("--draft-min", "2", "--draft-p-min", "0.5", "--spec-ngram-mod-n-max", "9", "--draft-p-split", "0")
    for flag in ("--draft-min", "--draft-p-min", "--draft-p-split", "--spec-ngram"):
        assert f"{flag}" in notes
    assert "--draft-quantize" in chosen(*vllm(model="x", quantization="fp8"))[1]
    assert "no weights" in chosen(*vllm(method="ngram", max_model_len=9))[1]
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
        (vllm(model="x", max_model_len="9"), "max_model_len"),
        (vllm(model="x", kv_cache_dtype="fp8"), "set --kv-dtype for both"),
        (vllm(model="x", kv_cache_dtype=["fp8"]), "set --kv-dtype for both"),
        ((*vllm(model="x"), "--spec-tokens", "3"), "give one of them"),
        (("--spec-method", "ngram", "--speculate", "off"), "give one of them"),
        (("-md", "x", "-ctkd", "q4_0"), "set --kv-dtype for both"),
        (("-md", "x", "-ngld", "99"), "--device is for both"),
        (("-md", "x", "-devd", "none"), "--device is for both"),
        (("-md", "x", "-tbd", "4"), "--threads is for both"),
        (("-lcs", "cache.bin"), "--speculate suffix"),
        (("--spec-type", "draft-medusa", "-md", "x"), "draft-medusa"),
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
        ("c", "DFlashDraftModel", "dflash"),
        ("assistant", "LlamaForCausalLM", "draft"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert chosen("-md", str(folder))[0].speculate == f"{method}={folder}"
    assert chosen(*vllm(method="mtp", model=str(folder)))[0].speculate == "mtp", "it is no assistant of Gemma 4"
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    assert chosen(*vllm(method="mtp", model=str(folder)))[0].speculate == f"draft={folder}"
