"""Every sampling field once: it reaches the engine as it was asked, or is refused by its name."""

from __future__ import annotations

import typing
from pkgutil import resolve_name

import pytest

from kvasir.fields import FIELDS
from kvasir.sched.admission import sampling_spec
from kvasir.serve.dialects.anthropic import wire as anthropic
from kvasir.serve.dialects.llamacpp import wire as llamacpp
from kvasir.serve.dialects.ollama import wire as ollama
from kvasir.serve.dialects.openai.params import to_params
from kvasir.serve.dialects.openai.wire import ChatRequest, CompletionRequest, EmbeddingRequest
from kvasir.types import ModelInfo, Request, SamplingParams, Task
from tests.serve.running import client

BODIES = {
    "openai": (CompletionRequest,),
    "anthropic": (anthropic.MessagesRequest,),
    "ollama": (ollama.ChatRequest, ollama.Options),
    "llamacpp": (llamacpp.CompletionRequest,),
}
INFO = ModelInfo("m", "a", (Task.GENERATE,), 260, 512)


def params(**fields) -> SamplingParams:
    return to_params(CompletionRequest(prompt="x", **fields), INFO)


@pytest.mark.parametrize("dialect", BODIES)
def test_a_dialect_has_the_fields_of_the_table(dialect):
    """Those that it declares itself too."""
    reply = {row.names[dialect] or row.name for row in FIELDS if dialect in row.names}
    assert reply <= {name for body in BODIES[dialect] for name in body.model_fields}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("n", 3, 3),
        ("temperature", 0, 0.0),
        ("temperature", 1.5, 1.5),
        ("top_p", 0.5, 0.5),
        ("top_k", 7, 7),
        ("top_k", -1, -1),
        ("min_p", 0.1, 0.1),
        ("typical_p", 0.9, 0.9),
        ("top_n_sigma", -1, -1.0),
        ("top_n_sigma", 1.5, 1.5),
        ("xtc_probability", 0.5, 0.5),
        ("xtc_threshold", 0.2, 0.2),
        ("dynatemp_range", 0.4, 0.4),
        ("dynatemp_exponent", 2, 2.0),
        ("mirostat", 2, 2),
        ("mirostat_tau", 3, 3.0),
        ("mirostat_eta", 0.2, 0.2),
        ("adaptive_target", 0.3, 0.3),
        ("adaptive_decay", 0, 0.0),
        ("dry_multiplier", 0.8, 0.8),
        ("dry_base", 2, 2.0),
        ("dry_allowed_length", 3, 3),
        ("dry_penalty_last_n", -1, -1),
        ("dry_sequence_breakers", ["\n\n", "*"], ("\n\n", "*")),
        ("dry_sequence_breakers", [], ()),
        ("bad_words", ["ab", "c"], ("ab", "c")),
        ("presence_penalty", -1.5, -1.5),
        ("frequency_penalty", 1, 1.0),
        ("repetition_penalty", 1.2, 1.2),
        ("logit_bias", {"5": -100, "7": 2.5}, {5: -100.0, 7: 2.5}),
        ("seed", -5, -5),
        ("seed", 2**63, 2**63),
        ("stop", "a", ("a",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop_token_ids", [1, 2], (1, 2)),
        ("min_tokens", 3, 3),
        ("ignore_eos", True, True),
        ("skip_special_tokens", False, False),
        ("include_stop_str_in_output", True, True),
        ("prompt_logprobs", 2, 2),
    ],
)
def test_a_field_of_the_request_reaches_the_sampling_parameters(name, value, expected):
    assert getattr(params(**{name: value}), name) == expected
    assert params(**{name: None}) == params()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("n", "2"),
        ("n", 1.0),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 2),
        ("typical_p", 0),
        ("typical_p", 1.5),
        ("top_n_sigma", -2),
        ("xtc_probability", 1.1),
        ("xtc_threshold", -0.1),
        ("dynatemp_range", -1),
        ("dynatemp_exponent", "1"),
        ("mirostat", 1),
        ("mirostat", True),
        ("mirostat_tau", -1),
        ("mirostat_eta", 11),
        ("adaptive_target", 1.1),
        ("adaptive_decay", 1),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_penalty_last_n", 1.0),
        ("dry_sequence_breakers", "x"),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", ["x"] * 33),
        ("bad_words", "x"),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", ["x"] * 1025),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", [1]),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop", [""]),
        ("stop", ["x"] * 65),
        ("stop", 5),
        ("stop", ["x", 5]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [260]),
        ("stop_token_ids", ["a"]),
        ("min_tokens", -1),
        ("min_tokens", 6),
        ("ignore_eos", "yes"),
        ("skip_special_tokens", 1),
        ("prompt_logprobs", -1),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("return_token_ids", "yes"),
        ("priority", 2**40),
        ("cache_salt", ""),
        ("cache_salt", "x" * 257),
        ("add_special_tokens", "no"),
        ("echo", 1),
        ("stream", "yes"),
        ("stream_options", {"other": True}),
        ("user", 5),
        ("max_tokens", 2**40),
    ],
)
async def test_a_field_out_of_its_range_is_refused_by_its_name(http, name, value):
    fields = {"prompt": "x", "max_tokens": 5, "stream": False, name: value}
    response = await http.post("/v1/completions", json=fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split(".")[0] == name


def test_a_models_recommendations_are_defaults_and_no_more():
    info = ModelInfo("m", "a", (Task.GENERATE,), 260, 512, default_sampling={"temperature": 0.6, "top_k": 20, "odd": 1})
    got = to_params(CompletionRequest(prompt="x", top_k=5), info)
    assert (got.temperature, got.top_k, got.top_p) == (0.6, 5, 1.0)


def test_mirostat_replaces_recommended_filters_but_not_requested_ones():
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
    info = ModelInfo("m", "a", (Task.GENERATE,), 260, 512, default_sampling=recommended)
    got = to_params(CompletionRequest(prompt="x", mirostat=2, top_p=0.9), info)
    assert (got.temperature, got.top_k, got.top_p, got.repetition_penalty) == (0.6, 0, 0.9, 1.1)
    assert to_params(CompletionRequest(prompt="x", mirostat=0), info).top_k == 20


def submitted(engine) -> list[Request]:
    """The requests that the engine gets from now on."""
    seen, submit = [], engine.submit

    def spy(request):
        seen.append(request)
        return submit(request)

    engine.submit = spy
    return seen


async def test_texts_of_samplers_reach_the_core_in_ids():
    async with client() as http:
        seen = submitted(http.front.engine)
        fields = {"max_tokens": 1, "bad_words": ["ab"], "dry_multiplier": 0.8, "dry_sequence_breakers": ["\n", "cd"]}
        await http.post("/v1/completions", json={"prompt": "x", **fields})
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], **fields})
        for request in seen:
            a, b, c, d, line = await http.front.encode("abcd\n", add_special_tokens=False)
            assert request.bad_word_ids == ((a, b),)
            assert request.dry_breaker_sequences == ((c, d),)
            assert request.dry_breakers[line >> 3] == 1 << (line & 7) and sum(request.dry_breakers) == 1 << (line & 7)
            spec = sampling_spec(request, 0, frozenset())
            assert (spec.bad_words, spec.dry_breakers) == (request.bad_word_ids, request.dry_breakers)
            assert spec.dry_breaker_sequences == request.dry_breaker_sequences
        assert len(seen) == 2
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
        assert (seen[2].bad_word_ids, seen[2].dry_breakers, seen[2].dry_breaker_sequences) == ((), b"", ())


async def test_priority_salt_and_tenant_reach_the_core():
    async with client() as http:
        seen = submitted(http.front.engine)
        fields = {"prompt": "x", "max_tokens": 1, "priority": -3, "cache_salt": "s"}
        await http.post("/v1/completions", json=fields)
        assert (seen[0].priority, seen[0].cache_salt, seen[0].params.max_tokens) == (-3, "0:s", 1)


def fields_of(*kinds: str) -> set[str]:
    return {name for kind in kinds for name in typing.get_type_hints(resolve_name(f"openai.types.{kind}"))}


@pytest.mark.parametrize(
    ("wire", "kinds"),
    [
        (
            ChatRequest,
            (
                "chat.completion_create_params:CompletionCreateParamsNonStreaming",
                "chat.completion_create_params:CompletionCreateParamsStreaming",
            ),
        ),
        (
            CompletionRequest,
            (
                "completion_create_params:CompletionCreateParamsNonStreaming",
                "completion_create_params:CompletionCreateParamsStreaming",
            ),
        ),
        (EmbeddingRequest, ("embedding_create_params:EmbeddingCreateParams",)),
    ],
)
def test_every_field_of_the_public_specification_has_a_decision(wire, kinds):
    assert fields_of(*kinds) - set(wire.model_fields) == set()
