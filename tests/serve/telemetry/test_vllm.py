"""The metrics under vLLM's names: there only with the flag, and with the values of ours."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from kvasir.serve.settings import ServeSettings
from tests.serve.running import client

SAME = {  # names of samples with one label, the model's name
    "prompt_tokens_total": "prompt_tokens_total",
    "generation_tokens_total": "generated_tokens_total",
    "kv_cache_usage_perc": "kv_usage_ratio",
    "prefix_cache_queries_total": "prefix_lookup_tokens_total",
    "prefix_cache_hits_total": "prefix_hit_tokens_total",
    "num_preemptions_total": "preemptions_total",
    "e2e_request_latency_seconds_sum": "request_seconds_sum",
    "request_prompt_tokens_sum": "request_prompt_tokens_sum",
    "request_generation_tokens_count": "answer_tokens_count",
}
SUMS = {  # those that we have by class
    "num_requests_running": "answers_running",
    "num_requests_waiting": "answers_waiting",
    "time_to_first_token_seconds_count": "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
    "inter_token_latency_seconds_count": "time_per_output_token_seconds_count",
    "request_queue_time_seconds_count": "queue_time_seconds_count",
}


async def scrape(settings: ServeSettings) -> list:
    async with client(settings) as http:
        for service_class in ("interactive", "batch", "batch"):
            body = {"prompt": "ab" * 40, "max_tokens": 5, "service_class": service_class}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        text = (await http.get("/metrics")).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def test_values_are_those_of_our_metrics():
    samples = await scrape(ServeSettings(vllm_metrics=True))
    for theirs, ours in (SAME | SUMS).items():
        found = [s for s in samples if s.name == f"vllm:{theirs}"]
        assert [s.labels for s in found] == [{"model_name": "fake"}]
        own = [s.value for s in samples if s.name == f"kvasir_{ours}"]
        assert len(own) == 1 if theirs in SAME else len(own) > 1
        assert abs(found[0].value - sum(own)) < 1e-9
    ended = [s for s in samples if s.name == "vllm:request_success_total"]
    assert [(s.labels["finished_reason"], s.value) for s in ended] == [("length", 3.0)]
    [first] = [s.value for s in samples if s.name == "vllm:time_to_first_token_seconds_count"]
    assert first == 3


async def test_a_server_without_the_flag_has_none_but_that_of_adapters():
    samples = await scrape(ServeSettings())
    assert not [s.name for s in samples if s.name.startswith("vllm:")]
