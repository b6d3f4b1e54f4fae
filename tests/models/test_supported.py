"""The page of supported models: it lists the registry's families, and says no more than the tests showed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="the families' configs are transformers'")

from kvasir.models import registry
from kvasir.models.registry import MODELS
from kvasir.parse.table import REASONING_FORMATS, TOOL_FORMATS
from tests.models.families_chat import TEMPLATES
from tests.models.mechanisms import facts_of
from tests.models.supported import (
    CHAT,
    GGUF,
    LOGITS,
    NO_GGUF,
    ORACLE,
    PAGE,
    Recorder,
    from_packages,
    listed,
    mark,
    merged,
    missing,
    read_results,
    render,
    spellings,
    state,
)  # fmt: skip
from tests.parse import published
from tests.parse.published_formats import EXPECTED
from tests.parse.test_table import FORMATS


def test_the_page_lists_exactly_the_families_of_the_registry():
    assert not missing(PAGE.read_text()), "run python -m tests.models.supported --page"


def test_the_page_shows_the_kept_results():
    found = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    shown = {name.strip(" `"): text.strip() for name, text in found}
    results = read_results()
    assert shown == {family: state(family, results) for family in MODELS}, "run python -m tests.models.supported --page"


def test_a_family_is_supported_only_where_all_four_passed():
    results = {kind: {"llama": True} for kind in (LOGITS, GGUF, CHAT, ORACLE)}
    assert state("llama", results) == "supported"
    assert state("llama", {**results, GGUF: {}}) == "partly"
    assert state("llama", {**results, GGUF: {"llama": False}}) == "partly"
    assert mark("llama", GGUF, {**results, GGUF: {"llama": False}}) == "FAILED"
    assert state("llama", {}) == "not tried"
    assert state("bert", {}) == "not tried"  # it has no chat format, but nothing was compared
    assert state("bert", {kind: {"bert": True} for kind in (LOGITS, GGUF, ORACLE)}) == "supported"
    page = render(results, {"llama": ("experts", "7")})
    assert listed(page) == sorted(MODELS) and "| `llama` | supported |" in page and "| experts | 7 |" in page
    assert missing(page, [*MODELS, "new family"]) == {"new family"}


def test_families_of_one_class_and_text_parts_share_their_results():
    results = {kind: {"roberta": True, "qwen3_5_text": True} for kind in (LOGITS, GGUF, ORACLE)}
    assert [mark("xlm-roberta", kind, results) for kind in (LOGITS, GGUF, ORACLE)] == ["yes"] * 3
    assert [mark("qwen3_5", kind, results) for kind in (LOGITS, GGUF, ORACLE)] == ["-", "yes", "yes"]
    assert mark("mistral3", ORACLE, {ORACLE: {"ministral3": False}}) == "FAILED"
    assert mark("qwen3_5", CHAT, {CHAT: {"qwen3_5_text": True}}) == "-"


def report(when: str, outcome: str, nodeid: str = "x.py::test") -> Any:
    return SimpleNamespace(when=when, passed=outcome == "passed", failed=outcome == "failed", nodeid=nodeid)


def test_tests_count_for_the_types_that_they_ask_the_registry_for(monkeypatch):
    recorder = Recorder()
    recorder.watch(monkeypatch)
    for name, outcome in (("Qwen3ForCausalLM", "passed"), ("llama", "failed"), ("qwen2", "skipped")):
        recorder.pytest_runtest_setup()
        registry.model_class_for({"architectures": [name]})
        recorder.pytest_runtest_logreport(report("setup", "passed"))
        recorder.pytest_runtest_logreport(report("call", outcome))
    assert (recorder.passed, recorder.failed) == ({"qwen3"}, {"llama"})
    recorder.pytest_runtest_setup()
    registry.model_class("olmo2")
    recorder.pytest_runtest_logreport(report("setup", "failed"))  # a fixture's failure counts, too
    assert recorder.failed == {"llama", "olmo2"}


def test_a_template_counts_for_its_families():
    recorder = Recorder()
    recorder.pytest_runtest_setup()
    nodeid = "tests/parse/test_table.py::test_format_is_detected[Qwen3.5-4B]"
    recorder.pytest_runtest_logreport(report("call", "passed", nodeid))
    assert {"qwen3_5", "qwen3_5_moe"} < recorder.passed < set(TEMPLATES)
    assert set(TEMPLATES.values()) <= {*FORMATS, *EXPECTED}


def test_templates_of_packages_count_as_they_were_read():
    name = TEMPLATES["apertus"]
    assert from_packages({name: {"passed": False}}) == {"apertus": False}
    kept = published.read_results()
    assert set(kept) == set(EXPECTED), "run python -m tests.parse.published with the packages that it names"
    for key, row in kept.items():
        assert row["passed"] == (not row["faults"] and (row["calls"], row["reasoning"]) == EXPECTED[key]), key
        assert row["calls"] in TOOL_FORMATS and row["package"].startswith(key.rpartition("/")[0] + " "), key
        assert row["reasoning"] is None or row["reasoning"] in REASONING_FORMATS, key


def test_families_without_an_architecture_of_llama_cpp_have_none():
    """If the package that names them learns one of these, the family's column is missing instead."""
    gguf = pytest.importorskip("gguf", reason="gguf names llama.cpp's architectures")
    known = {re.sub(r"[^a-z0-9]", "", name) for name in gguf.MODEL_ARCH_NAMES.values()}
    assert set(MODELS) >= NO_GGUF
    assert not {family for family in NO_GGUF if re.sub(r"[^a-z0-9]", "", family) in known}
    assert not NO_GGUF & set(read_results()[GGUF])
    assert mark("zamba2", GGUF, {}) == "none"


def test_a_partial_run_changes_only_its_families():
    before = {"llama": True, "qwen2": True, "qwen3": False}
    found = Recorder({"qwen3", "gpt2"}, {"qwen2"})
    assert merged(before, found, ["qwen3", "llama"]) == {"qwen2": True, "qwen3": True}
    assert merged(before, found, []) == {"gpt2": True, "qwen2": False, "qwen3": True}
    assert spellings("glm4_moe") == {"glm4_moe", "glm4-moe"} and "qwen3-5" in spellings("qwen3_5_text")


def test_facts_come_from_the_models():
    assert facts_of("qwen3") == ("q and k norms", "500")
    mechanisms, memory = facts_of("gpt_oss")
    assert {"attention sinks", "experts", "sliding window"} <= set(mechanisms.split(", ")) and int(memory) > 0
    assert facts_of("bert")[1] == "-"
    assert int(facts_of("glm4_moe")[1]) > 0 and int(facts_of("gemma4_text")[1]) > 0
