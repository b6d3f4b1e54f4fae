"""`--rope-scaling`, `--hf-overrides`, LongRoPE's choice of factors: what they change, and that stored prefixes know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.errors import ConfigError, ModelFileError, UnsupportedModel
from kvasir.models.overrides import NONE, Overrides
from tests.engine.cores import core_of
from tests.oracle import Answers, plain
from tests.runner.made import files_of, request

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def made(family: str, folder: Path) -> str:
    files_of(folder, family)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return made("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def longrope(tmp_path_factory) -> str:
    """A context of 512 tokens, of which 64 are within the original length."""
    return made("phi3-longrope", tmp_path_factory.mktemp("longrope"))


def answers(folder: str, length: int = 40, **options) -> Answers:
    core = core_of(folder, threads=1, block_size=16, **options)
    try:
        return plain(core, [request("a", range(length), max_tokens=4, logprobs=2)])
    finally:
        core.close()


# -- LongRoPE ----------------------------------------------------------------------------------------


def test_the_served_context_chooses_the_factors_and_no_prompt_does(longrope):
    short, long = answers(longrope, max_model_len=64), answers(longrope, max_model_len=65)
    assert short != long
    assert answers(longrope, max_model_len=50) == short
    assert answers(longrope) == answers(longrope, max_model_len=300) == long


@pytest.mark.parametrize("executor", ["program", "eager"])
def test_a_prefix_of_a_short_prompt_serves_a_long_one(longrope, executor):
    options = {"executor": executor, "dtype": "float32", "threads": 1, "block_size": 16}
    whole = request("long", range(90), max_tokens=3, logprobs=2)
    alone = plain(core_of(longrope, **options), [whole])
    core = core_of(longrope, **options)
    plain(core, [request("short", range(40), max_tokens=1)])
    again = plain(core, [whole])
    assert core.stats().cached_tokens > 30
    assert again == alone


def test_the_summary_names_the_factors_and_what_selects_the_others(longrope):
    for length, kind, other in ((64, "short", "beyond 64"), (65, "long", "up to 64")):
        core = core_of(longrope, max_model_len=length)
        assert any(f"LongRoPE uses its {kind} factors" in line and other in line for line in core.summary)
        core.close()


# -- overrides ---------------------------------------------------------------------------------------


def test_a_rope_scaling_replaces_the_models(folder):
    scaled = answers(folder, rope_scaling=json.dumps(YARN))
    assert scaled != answers(folder)
    assert answers(folder, hf_overrides=json.dumps({"rope_scaling": YARN})) == scaled


def test_a_scaling_extends_the_context(folder):
    core = core_of(folder, rope_scaling='{"rope_type": "linear", "factor": 2}')
    assert core.info.max_model_len == 512
    core.close()


def test_overrides_are_merged_into_objects_and_into_the_text_part():
    given = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "vision_config": {"a": 1}}
    found = Overrides(fields={"rope_parameters": YARN}).apply(given)
    assert found == {**given, "rope_parameters": {**YARN, "rope_theta": 5e5}}
    assert Overrides(rope=YARN).apply(given) == found
    text = {"text_config": {"rope_scaling": None}}
    assert Overrides(rope=YARN).apply(text) == {"text_config": {"rope_scaling": YARN}}
    assert NONE.apply(given) == given and not NONE.identity


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": "[1]"}, "rope_scaling"),
        ({"hf_overrides": "{"}, "hf_overrides"),
        ({"hf_overrides": '{"max_lenght": 3}'}, "max_lenght"),
    ],
)
def test_bad_options_are_refused_by_name(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        core_of(folder, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_scaling": '{"rope_type": "spiral"}'}, "spiral"),
        ({"rope_scaling": '{"rope_type": "yarn", "fcator": 4}'}, "fcator"),
        ({"hf_overrides": '{"attn_windows": 3}'}, "attn_windows"),
        ({"hf_overrides": '{"model_type": "gpt5"}'}, "gpt5"),
        ({"hf_overrides": '{"num_attention_heads": -1}'}, "num_attention_heads"),
    ],
)
def test_overrides_are_checked_as_the_config_is(folder, options, message):
    with pytest.raises((ModelFileError, UnsupportedModel), match=message):
        core_of(folder, **options)


def test_kinds_of_layers_with_their_own_settings_need_them_by_name(tmp_path):
    with pytest.raises(ConfigError, match="hf_overrides"):
        core_of(made("olmo3", tmp_path), rope_scaling=json.dumps(YARN))


# -- stored prefixes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("phi3-longrope", ({"max_model_len": 64}, {"max_model_len": 128})),
        ("llama", ({}, {"rope_scaling": json.dumps(YARN)})),
        ("llama", ({"hf_overrides": '{"rope_theta": 100.0}'}, {"hf_overrides": '{"rope_theta": 200.0}'})),
    ],
)
def test_engines_whose_angles_differ_share_no_stored_prefix(tmp_path, monkeypatch, model, changes):
    monkeypatch.setattr("kvasir.sched.service.Service.prefill_seconds", lambda self, start, tokens: 30.0)
    (tmp_path / "model").mkdir()
    folder, loads = made(model, tmp_path / "model"), []
    for change in (*changes, changes[0]):
        core = core_of(folder, threads=1, block_size=16, cache_dir=str(tmp_path / "kv"), **change)
        plain(core, [request("a", range(50))])
        core.close(30.0)
        loads.append(core.stats().tier_loads.get("loaded", 0))
    assert loads[:2] == [0, 0] and loads[2] > 0
