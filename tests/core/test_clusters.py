"""Length clusters: who is put together, and that nobody is passed over for longer than was said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.clusters import Clustered
from headway.core.config import SchedulerConfig
from headway.core.policies import Fcfs, Sjf
from headway.core.request import Request, SamplingParams
from headway.core.table import RequestTable, Rows
from tests.core.memory import World


def queue(requests: list[tuple[float, int, int]], now: float) -> Rows:
    """Of (arrival, prompt length, output length)."""
    table = RequestTable()
    for handle, (arrival, prompt_len, output_len) in enumerate(requests):
        table.add(Request(str(handle), handle, [1] * prompt_len, SamplingParams(), arrival), prompt_len + output_len, 2)
    return Rows(table, np.arange(len(requests), dtype=np.int64), now)


def order(policy: Clustered, rows: Rows, now: float) -> list[int]:
    return np.lexsort((rows.seq, policy.score(rows, now))).tolist()


REQUESTS = [(0.0, 10, 10), (1.0, 500, 20), (2.0, 12, 11), (3.0, 490, 25), (4.0, 11, 200), (5.0, 9, 10)]


def test_those_like_the_first_go_with_it():
    assert order(Clustered(Fcfs(), patience=100.0), queue(REQUESTS, 6.0), 6.0)[:3] == [0, 5, 2]


def test_the_first_is_the_policys():
    rows = queue([(0.0, 900, 10), (1.0, 100, 10), (2.0, 10, 10), (3.0, 15, 10)], 4.0)
    assert order(Clustered(Sjf(), patience=100.0), rows, 4.0) == [2, 3, 1, 0]


def test_the_predicted_output_counts_as_the_prompt_does():
    rows = queue(REQUESTS, 6.0)
    rows._table.predicted[2] = 1000
    assert order(Clustered(Fcfs(), patience=100.0), rows, 6.0)[:2] == [0, 5]
    assert order(Clustered(Fcfs(), patience=100.0), rows, 6.0)[-1] == 2


def test_past_their_patience_the_policys_order_rules():
    assert order(Clustered(Fcfs(), patience=3.5), queue(REQUESTS, 6.0), 6.0)[:3] == [0, 1, 2]
    assert order(Clustered(Fcfs(), patience=0.0), queue(REQUESTS, 6.0), 6.0) == list(range(6))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=40),
    st.floats(0, 10),
    st.integers(1, 10),
)
def test_who_has_lost_patience_is_passed_only_by_those_before_it(requests, patience, size):
    now = 10.0
    rows = queue(requests, now)
    policy = Clustered(Fcfs(), patience)
    score = policy.score(rows, now)
    assert np.isfinite(score).all()
    chosen = order(policy, rows, now)[:size]
    first = np.lexsort((rows.seq, rows.arrival))
    place = {row: i for i, row in enumerate(first.tolist())}
    for row in set(range(len(requests))) - set(chosen):
        if rows.waited[row] >= patience:
            assert all(place[other] < place[row] for other in chosen)


def test_an_empty_queue_has_no_first():
    assert Clustered(Fcfs(), 1.0).score(queue([], 0.0), 0.0).tolist() == []


def config(**more) -> SchedulerConfig:
    return SchedulerConfig(
        **{"batching": "static", "policy": "fcfs", "max_batch_size": 4, "max_num_batched_tokens": 64, "depth": 1} | more
    )


def pads(**more) -> int:
    world = World(config(**more), num_blocks=400, max_model_len=128)
    for handle in range(16):
        long = handle % 2
        world.add(handle, prompt_len=5 + 40 * long, max_tokens=4 + 20 * long)
    world.drain()
    assert len(world.finished) == 16
    return world.scheduler.counters.num_pad_tokens


def test_clusters_save_padding():
    assert pads(length_clusters=True, cluster_wait=1000.0) == 0
    assert pads(length_clusters=True, cluster_wait=0.0) == pads() > 300


def test_clusters_where_nothing_is_padded_are_refused():
    with pytest.raises(ValueError, match="continuous pads nothing"):
        World(config(batching="continuous", length_clusters=True))
