"""/metrics: every name is there from the start, and the figures are those of the requests that were served."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.server.tally import Histogram
from tests.server.conftest import MODEL, Server

VLLM = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "iteration_tokens_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_inference_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "cache_config_info",
)


def scrape(server: Server) -> dict[str, float]:
    """Samples of an idle server by name and by their labels but model_name, engine and le; buckets left out."""
    server.wait_until_idle()
    text = httpx.get(f"{server.url}/metrics").text
    samples = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(("vllm:", "headway:")):
            for sample in family.samples:
                labels = dict(sample.labels)
                assert labels.pop("model_name") == MODEL
                assert labels.pop("engine") == "0"
                if "le" not in labels:
                    samples[sample.name + "".join(f"/{value}" for value in labels.values())] = sample.value
    return samples


def test_names_do_not_depend_on_what_happened(server: Server) -> None:
    before = scrape(server)
    for name in VLLM:
        assert any(key.startswith(f"vllm:{name}") for key in before), name
    body = {"prompt": "a b c", "max_tokens": 4, "stream": True}
    httpx.post(f"{server.url}/v1/completions", json=body)
    httpx.post(f"{server.url}/v1/completions", json={"prompt": ""})
    httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "model": "x"})
    assert set(scrape(server)) == set(before)


def test_figures_are_those_of_the_requests(server: Server) -> None:
    before = scrape(server)
    promised = {"deadline_ms": 60_000, "request_class": "realtime"}
    broken = {"ttft_slo_ms": 0.001, "request_class": "batch"}
    with httpx.Client(base_url=server.url) as client:
        ids = [5, 6, 7]
        client.post("/v1/completions", json={"prompt": ids, "max_tokens": 11, "ignore_eos": True} | promised)
        client.post("/v1/completions", json={"prompt": [ids, ids], "max_tokens": 2, "ignore_eos": True} | broken)
        client.post("/v1/completions", json={"prompt": "a<|im_end|>", "max_tokens": 9})
        client.post("/v1/completions", json={"prompt": ids, "max_tokens": -1})
    after = scrape(server)
    changed = {key: after[key] - before[key] for key in after if after[key] != before[key]}
    assert changed["vllm:prompt_tokens_total"] == 3 * 3 + 2
    assert changed["vllm:generation_tokens_total"] == 11 + 2 * 2 + 2
    assert changed["vllm:request_success_total/length"] == 3
    assert changed["vllm:request_success_total/stop"] == 1
    for name in (
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_time_per_output_token_seconds",
        "time_to_first_token_seconds",
    ):
        assert changed[f"vllm:{name}_count"] == 4, name
    assert changed["vllm:request_generation_tokens_sum"] == 11 + 2 * 2 + 2
    assert changed["vllm:inter_token_latency_seconds_count"] == 10 + 2 + 1
    total = changed["vllm:e2e_request_latency_seconds_sum"]
    parts = changed["vllm:request_queue_time_seconds_sum"] + changed["vllm:request_inference_time_seconds_sum"]
    assert parts == pytest.approx(total)
    assert changed["vllm:iteration_tokens_total_count"] == changed["headway:steps_total"]
    assert changed["vllm:iteration_tokens_total_sum"] == pytest.approx(changed["headway:batched_tokens_total"])
    assert changed["vllm:prefix_cache_queries_total"] == changed["vllm:prompt_tokens_total"]
    assert changed["headway:requests_slo_attained_total/realtime"] == 1
    assert changed["headway:requests_slo_missed_total/batch"] == 2
    assert changed["headway:requests_rejected_total/invalid_request"] == 1
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0


def test_histogram_counts_a_value_in_the_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1, 2, 5))
    histogram.observe_all([0.5, 1.0, 1.5, 2.0, 5.0, 7.0])
    histogram.observe(3.0, times=10)
    assert histogram.counts == [2, 2, 11, 1]
    assert histogram.total == pytest.approx(47.0)
