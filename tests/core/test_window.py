"""The adaptive window on steady, bursty and sparse arrivals, and within the limits of each class."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.config import SchedulerConfig
from headway.core.request import Request, SamplingParams
from headway.core.table import RequestTable, Rows
from headway.core.window import CLASS_BOUNDS, AdaptiveWindow, FixedWindow
from tests.core.memory import World

LONGEST = 0.05


def queue(arrivals: list[float], now: float, request_class: str = "") -> Rows:
    table = RequestTable()
    for handle, arrival in enumerate(arrivals):
        request = Request(str(handle), handle, [1], SamplingParams(), arrival, request_class=request_class)
        table.add(request, 2, 2)
    return Rows(table, np.arange(len(arrivals), dtype=np.int64), now)


def adaptive(arrivals: list[float], on_board: float) -> AdaptiveWindow:
    window = AdaptiveWindow(LONGEST)
    for at in arrivals:
        window.arrived(at)
    for _ in range(window.GROUPS):
        window.ran(on_board)
    return window


def group(window: AdaptiveWindow, arrivals: list[float], size: int, request_class: str = "") -> tuple[int, float]:
    """How many leave together and when, the board being empty, if these come and nobody else."""
    here: list[float] = []
    for i, at in enumerate(arrivals):
        window.arrived(at)
        here.append(at)
        if len(here) == size:
            return size, at
        closes = max(at, window.closes(queue(here, at, request_class), size, at))
        if i + 1 == len(arrivals) or closes < arrivals[i + 1]:
            return len(here), closes
    raise AssertionError("nobody came")


def regular(count: int, gap: float, start: float = 0.0) -> list[float]:
    return [start + i * gap for i in range(count)]


def test_a_fixed_window_counts_from_the_first_that_waits():
    assert FixedWindow(2.0).closes(queue([5.0, 3.0, 4.0], 5.5), 8, 5.5) == 5.0


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-4, 1e-3), st.integers(2, 32), st.floats(0.1, 10))
def test_steady_and_dense_arrivals_fill_the_group(gap, size, on_board):
    window = adaptive(regular(64, gap), on_board)
    count, at = group(window, regular(size, gap, start=1.0), size)
    assert count == size
    assert at == pytest.approx(1.0 + (size - 1) * gap)


@settings(max_examples=50, deadline=None)
@given(st.floats(1.01, 1000), st.floats(1e-3, 10))
def test_where_nobody_can_be_expected_in_time_nobody_is_waited_for(times, on_board):
    window = adaptive(regular(64, LONGEST * times), on_board)
    assert group(window, [1e6], 8) == (1, 1e6)


@settings(max_examples=50, deadline=None)
@given(st.integers(3, 20), st.floats(1e-5, 2e-4), st.floats(0.05, 5))
def test_a_burst_leaves_together_and_soon(count, gap, on_board):
    """Bursts with long pauses between them: the last of a burst is not followed by a wait for the next one."""
    bursts = [at for burst in range(10) for at in regular(count, gap, start=burst * 60.0)]
    window = adaptive(bursts, on_board)
    left, at = group(window, regular(count, gap, start=1000.0), 64)
    assert left == count
    assert at <= 1000.0 + LONGEST
    assert at - (1000.0 + (count - 1) * gap) <= on_board / count + 1e-9


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-5, 1e-1), st.floats(1e-3, 1.0), st.integers(2, 32))
def test_waiting_ends_where_those_who_wait_lose_more_than_others_gain(gap, on_board, size):
    window = adaptive(regular(64, gap), on_board)
    count, at = group(window, regular(size, gap, start=1e4), size)
    last = 1e4 + (count - 1) * gap
    if last < at - 1e-9 and count < size:
        assert (count - 1) * (at - last) <= on_board * 1.001
    if count > 1:
        assert (count - 1) * window.gap < on_board


def test_more_who_wait_and_denser_arrivals_mean_a_shorter_window():
    def length(gap: float, waiting: int) -> float:
        window = adaptive([*regular(64, gap), 1.0], on_board=100.0)
        return window.closes(queue(regular(waiting, 0.0, start=1.0), 1.0), 32, 1.0) - 1.0

    by_queue = [length(1e-3, waiting) for waiting in (1, 4, 16, 30)]
    by_gap = [length(gap, 4) for gap in (1e-4, 3e-4, 1e-3, 2e-3)]
    assert by_queue == sorted(by_queue, reverse=True)
    assert by_gap == sorted(by_gap)
    assert by_queue[0] > by_queue[-1]
    assert by_gap[0] < by_gap[-1]


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["realtime", "batch", ""]),
    st.lists(st.floats(1e-6, 0.2), min_size=2, max_size=40),
    st.floats(1e-4, 10),
    st.integers(1, 7),
)
def test_nobody_waits_longer_than_its_class_allows(name, gaps, on_board, waiting):
    window = adaptive(np.cumsum(gaps).tolist(), on_board)
    now = float(sum(gaps))
    longest = CLASS_BOUNDS.get(name, (0.0, LONGEST))[1]
    assert window.closes(queue([now] * waiting, now, name), 8, now) <= now + longest + 1e-9


def test_one_in_a_hurry_closes_the_window_for_all():
    window = adaptive([*regular(64, 2e-3), 1.0], on_board=100.0)
    rows = queue([1.0, 1.0], 1.0, "batch")
    alone = window.closes(rows, 32, 1.0)
    rows._table.request_class[1] = rows.code("realtime")
    assert window.closes(rows, 32, 1.0) == pytest.approx(1.005)
    assert alone > 1.02


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0, 100), max_size=100),
    st.lists(st.floats(1e-6, 1), min_size=33, max_size=33),
    st.integers(1, 7),
)
def test_after_a_change_the_past_does_not_count(before, gaps, waiting):
    """It settles for certain: what came before the last 32 gaps and 8 groups leaves no trace."""
    start = 1e6
    arrivals = (start + np.cumsum(gaps)).tolist()
    fresh = adaptive(arrivals, on_board=0.5)
    used = adaptive(sorted(before), on_board=7.0)
    for at in arrivals:
        used.arrived(at)
    for _ in range(used.GROUPS):
        used.ran(0.5)
    now = arrivals[-1]
    rows = queue(arrivals[-waiting:], now)
    assert used.closes(rows, 8, now) == fresh.closes(rows, 8, now)


def test_the_scheduler_tells_it_how_long_groups_are_on_board():
    config = SchedulerConfig(batching="dynamic", wait_window="adaptive", max_wait=3.0, max_batch_size=4, depth=1)
    world = World(config, num_blocks=400, max_model_len=64)
    world.run([(i * 20.0, 4, 1 + 4 * (i % 2), 10**6, None) for i in range(8)])
    window = world.scheduler.strategies.formation.window
    assert window.missing == pytest.approx((1 + 5) / 2 / 2)  # steps of 1 s, answers of 1 and 5 tokens
    assert window.gap == pytest.approx(20 / np.log(2))
    assert all(len(batch.admitted) <= 1 for batch in world.executor.batches)


def test_an_unknown_window_is_refused():
    with pytest.raises(ValueError, match="adaptive, fixed"):
        World(SchedulerConfig(batching="dynamic", wait_window="none"))
