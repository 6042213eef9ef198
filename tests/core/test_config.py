"""Limits that contradict each other are an error that names both."""

from __future__ import annotations

import pytest

from headway.core.config import SchedulerConfig
from headway.core.step_time import StepTimeModel
from headway.core.strategies import Strategies


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_batch_size": 64, "max_num_batched_tokens": 32}, ("max_batch_size", "max_num_batched_tokens")),
        ({"max_batch_size": 64, "max_num_seqs": 32}, ("max_batch_size", "max_num_seqs")),
        ({"budget": "latency", "chunked_prefill": False}, ("latency", "chunked_prefill")),
        ({"budget": "latency", "batching": "static"}, ("latency", "batching static", "tpot_slo")),
        ({"budget": "latency", "batching": "dynamic"}, ("latency", "batching dynamic", "tpot_slo")),
        ({"burst_size": 8, "max_batch_size": 32, "batching": "static"}, ("burst_size (8)", "max_batch_size (32)")),
        ({"burst_size": 8, "max_batch_size": 32, "batching": "dynamic"}, ("burst_size (8)", "batching dynamic")),
        ({"length_clusters": True, "batching": "continuous"}, ("length_clusters", "continuous")),
    ],
)
def test_contradictions(settings: dict, named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=" ") as error:
        Strategies.of(SchedulerConfig(**settings), StepTimeModel())
    assert all(name in str(error.value) for name in named), str(error.value)


def test_what_is_only_without_effect_is_allowed() -> None:
    SchedulerConfig(burst_size=8, max_batch_size=32)
    SchedulerConfig(burst_size=32, max_batch_size=32, batching="static")
    SchedulerConfig(max_batch_size=2, max_num_partial_prefills=4)
    SchedulerConfig(tpot_slo=0.01, wait_window="adaptive")
