"""/metrics: what dashboards know under vLLM's names, and headway's own. The names are the same in every set-up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from headway.core.accounting import State
from headway.core.request import FinishReason
from headway.server.promises import QUARTILES, REQUEST_CLASSES
from headway.server.tally import REJECTIONS, SERVED_STATES, Histogram, Tally

if TYPE_CHECKING:
    from headway.engine.api import Engine

_WAITS = tuple(state for state in State if state not in SERVED_STATES)
_QUEUE_WAITS = tuple(state for state in _WAITS if state is not State.INTAKE)


class Exposition(Collector):
    """Turns the tally and the engine's latest snapshot into samples when somebody scrapes."""

    def __init__(self, engine: Engine, tally: Tally) -> None:
        self.engine = engine
        self.tally = tally
        self._labels = {"model_name": engine.model_name, "engine": "0"}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """The page, in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        self.tally.snapshot(self.engine.stats)
        yield from self._engine_gauges()
        yield from self._engine_counters()
        yield from self._request_counters()
        yield from self._histograms()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily, name, text, "", {"": value})

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(CounterMetricFamily, name, text, "", {"": value})

    def _labelled(
        self,
        family: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        """A family with one sample a value of `label`."""
        names = [*self._labels, label] if label else list(self._labels)
        metric = family(name, text, labels=names)
        for key, value in values.items():
            metric.add_metric([*self._labels.values(), key] if label else list(self._labels.values()), value)
        return metric

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        metric = HistogramMetricFamily(name, text, labels=list(self._labels))
        below, buckets = 0, []
        for bound, count in zip((*map(str, map(float, histogram.bounds)), "+Inf"), histogram.counts, strict=True):
            below += count
            buckets.append((bound, below))
        metric.add_metric(list(self._labels.values()), buckets, histogram.total)
        return metric

    def _engine_gauges(self) -> Iterator[Metric]:
        stats, capacity, gauge = self.engine.stats, self.engine.capacity, self._gauge
        reasons = {state.label: stats.waiting_by_reason.get(state.label, 0) for state in _QUEUE_WAITS}
        yield gauge("vllm:num_requests_running", "Requests on board.", stats.num_running)
        yield gauge("vllm:num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield self._labelled(
            GaugeMetricFamily,
            "vllm:num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for.",
            "reason",
            reasons,
        )
        yield self._labelled(
            GaugeMetricFamily,
            "headway:num_requests_paused_by_reason",
            "Requests on board that get nothing in a step, by what they wait for.",
            "reason",
            {state.label: stats.paused_by_reason.get(state.label, 0) for state in _WAITS},
        )
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks that are held; 1 is all.", stats.kv_usage)
        yield gauge("vllm:cpu_cache_usage_perc", "Share of the host's KV blocks that are held.", stats.host_kv_usage)
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV pool.",
            labels=[*self._labels, "block_size", "num_gpu_blocks"],
        )
        info.add_metric([*self._labels.values(), str(capacity.block_size), str(capacity.num_blocks)], 1)
        yield info
        yield gauge(
            "headway:batch_efficiency", "Rows in a step / max_batch_size, over all steps.", stats.batch_efficiency
        )
        yield gauge("headway:kv_fragmentation", "Unused tokens / tokens in held KV blocks.", stats.kv_fragmentation)
        computed = stats.num_batched_tokens + stats.num_pad_tokens
        yield gauge(
            "headway:padding_waste",
            "Padding / tokens computed, over all steps.",
            stats.num_pad_tokens / computed if computed else 0.0,
        )
        yield gauge(
            "headway:fairness_index",
            "Jain's index of tokens computed / weight in the last 30 s, over the tenants that had requests waiting "
            "all the time: 1 is fair, 1/n is all to one of n; NaN where fewer than two had.",
            stats.fairness,
        )
        yield self._labelled(
            GaugeMetricFamily,
            "headway:tenant_virtual_tokens",
            "The fair policy's account: tokens computed for the tenants of the key file / weight; who comes back from "
            "idling is lifted to where the others are.",
            "tenant",
            stats.tenant_counters,
        )
        yield gauge("headway:step_time_error", "Mean relative error of predicted step times.", stats.step_time_error)

    def _engine_counters(self) -> Iterator[Metric]:
        stats, counter = self.engine.stats, self._counter
        yield counter("vllm:num_preemptions_total", "Times that a request lost its place.", stats.num_preemptions)
        yield counter(
            "headway:prefix_cache_evictions_total", "KV blocks whose content was forgotten.", stats.num_forgotten_blocks
        )
        yield counter("headway:steps_total", "Steps computed.", stats.num_steps)
        yield counter("headway:batched_tokens_total", "Tokens computed in steps.", stats.num_batched_tokens)
        yield counter("headway:padding_tokens_total", "Padding computed in steps.", stats.num_pad_tokens)
        yield counter("headway:host_gap_seconds_total", "Time without a step though there was work.", stats.host_gap)
        yield counter(
            "headway:preemption_recomputed_tokens_total",
            "Tokens computed again after a preemption.",
            stats.num_recomputed_tokens,
        )
        yield counter("headway:swaps_total", "Preemptions by swapping out.", stats.num_swaps)
        yield counter(
            "headway:swapped_blocks_total",
            "KV blocks copied to the host's memory and back.",
            stats.num_swapped_blocks,
        )
        yield counter(
            "headway:watchdog_alarms_total",
            "Times that nothing happened though requests waited.",
            self.engine.num_alarms,
        )
        yield self._labelled(
            CounterMetricFamily,
            "headway:tenant_tokens_total",
            "Tokens computed for the tenants of the key file, cached ones not counted.",
            "tenant",
            stats.tenant_tokens,
        )
        for name, text in (
            ("drafts", "Drafts."),
            ("draft_tokens", "Tokens drafted."),
            ("accepted_tokens", "Accepted."),
        ):
            yield counter(f"vllm:spec_decode_num_{name}_total", text, 0)

    def _request_counters(self) -> Iterator[Metric]:
        tally, counter = self.tally, self._counter
        looked_up = tally.prompt_tokens if self.engine.config.scheduler.prefix_caching else 0
        yield counter("vllm:prompt_tokens_total", "Tokens of prompts read.", tally.prompt_tokens)
        yield counter("vllm:generation_tokens_total", "Tokens generated.", tally.generation_tokens)
        yield counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", looked_up)
        yield counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", tally.cached_tokens)
        yield self._labelled(
            CounterMetricFamily,
            "vllm:request_success_total",
            "Finished requests.",
            "finished_reason",
            {reason.label: tally.finished[reason] for reason in FinishReason},
        )
        yield self._labelled(
            CounterMetricFamily,
            "headway:requests_rejected_total",
            "Requests that were refused.",
            "reason",
            {reason: tally.rejected[reason] for reason in REJECTIONS},
        )
        yield self._labelled(
            CounterMetricFamily,
            "headway:request_wait_seconds_total",
            "Time that finished requests have waited, by what for.",
            "reason",
            {state.label: tally.state_times[state.label] for state in _WAITS},
        )
        promises = tally.promises
        views = (
            ("", "request_class", promises.by_class, {group or "none": group for group in REQUEST_CLASSES}),
            ("_by_tenant", "tenant", promises.by_tenant, {tenant: tenant for tenant in promises.tenants}),
            ("_by_length", "quartile", promises.by_length, {quartile: quartile for quartile in QUARTILES}),
        )
        for view, label, counts, names in views:
            for kept, name, text in (
                (True, "slo_attained", "Requests whose promise was kept; their rate is the goodput."),
                (False, "slo_missed", "Requests whose promise was broken, and refused ones."),
            ):
                yield self._labelled(
                    CounterMetricFamily,
                    f"headway:requests_{name}{view}_total",
                    text,
                    label,
                    {shown: counts[key, kept] for shown, key in names.items()},
                )

    def _histograms(self) -> Iterator[Metric]:
        tally, histogram = self.tally, self._histogram
        yield histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", tally.step_tokens)
        yield histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", tally.first_token)
        yield histogram("vllm:inter_token_latency_seconds", "Between two tokens.", tally.token_gap)
        yield histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time per token.", tally.token_mean
        )
        yield histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", tally.request)
        yield histogram("vllm:request_queue_time_seconds", "Waiting, for whatever reason.", tally.queue)
        yield histogram("vllm:request_inference_time_seconds", "Being computed.", tally.inference)
        yield histogram("vllm:request_prefill_time_seconds", "The prompt being computed.", tally.prefill)
        yield histogram("vllm:request_decode_time_seconds", "The answer being computed.", tally.decode)
        yield histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", tally.prompt_length)
        yield histogram("vllm:request_generation_tokens", "Tokens of an answer.", tally.output_length)
