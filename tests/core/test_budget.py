"""How a step's tokens are shared, and that the latency budget keeps what was promised to those who decode."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.budget import LatencyBound, StepLimits
from headway.core.config import SchedulerConfig
from headway.core.load import Load
from headway.core.request import Request, SamplingParams
from headway.core.step_time import StepTimeModel
from headway.core.table import RequestTable, Rows
from tests.core.memory import World

PER_TOKEN, BASE = 1e-4, 2e-3


def device(load: Load) -> float:
    return BASE + PER_TOKEN * load.tokens


def fitted() -> StepTimeModel:
    model = StepTimeModel()
    loads = [Load(rows * tokens, 0.0, rows, 100.0 * rows) for tokens in (1, 3, 9, 30, 90, 270) for rows in (1, 2, 4)]
    for load in loads * 40:
        model.observe(load, device(load))
    return model


MODEL = fitted()


def on_board(prompts: list[int], decodes: int) -> Rows:
    """Rows of which `decodes` lack one token, and the others what `prompts` says."""
    table = RequestTable()
    for handle, lacking in enumerate([*prompts, *[1] * decodes]):
        tokens = [1] * max(lacking, 8)
        row = table.add(Request(str(handle), handle, tokens, SamplingParams(), 0.0), len(tokens) + 16, 2)
        table.computed[row] = len(tokens) - lacking
    return Rows(table, np.arange(len(table), dtype=np.int64), 0.0)


def test_prompts_get_what_the_promise_leaves():
    budget = LatencyBound(fitted(), promise=0.022, partial=1)
    tokens = budget.grant(on_board([400, 400], decodes=10), StepLimits(64, 512), 0.0)
    assert tokens[2:].tolist() == [1] * 10
    assert 0.9 * 190 <= tokens[:2].sum() <= 190  # 2 ms and 0.1 ms a token: 200 tokens in 22 ms


def test_a_short_step_takes_all_that_there_is():
    budget = LatencyBound(fitted(), promise=1.0, partial=2)
    assert budget.grant(on_board([40, 30], decodes=3), StepLimits(64, 512), 0.0).tolist() == [40, 30, 1, 1, 1]


def test_before_it_knows_the_device_it_is_careful():
    tokens = LatencyBound(StepTimeModel(), promise=1.0).grant(on_board([400], decodes=4), StepLimits(64, 512), 0.0)
    assert tokens.tolist() == [LatencyBound.LEAST, 1, 1, 1, 1]


def test_with_nobody_decoding_there_is_nothing_to_keep():
    budget = LatencyBound(fitted(), promise=1e-3, partial=1)
    assert budget.grant(on_board([400], decodes=0), StepLimits(64, 256), 0.0).tolist() == [256]


def test_late_arrivals_are_counted_with_what_the_step_has_already():
    budget = LatencyBound(fitted(), promise=0.022, partial=1)
    had = Load(150, 0.0, 11, 1000)
    tokens = budget.grant(on_board([400], decodes=0), StepLimits(53, 362, had), 0.0)
    assert 0.8 * 50 <= tokens[0] <= 50


def test_a_late_prompt_waits_where_the_step_is_full():
    budget = LatencyBound(fitted(), promise=0.022, partial=1)
    assert budget.grant(on_board([40], decodes=0), StepLimits(53, 300, Load(205, 0.0, 11, 1000)), 0.0).tolist() == [0]


def test_prompts_are_not_starved_by_a_promise_that_cannot_be_kept():
    budget = LatencyBound(fitted(), promise=1e-3, partial=1)
    left, steps = 2000, 0
    while left > 0:
        left -= int(budget.grant(on_board([left], decodes=4), StepLimits(64, 512), 0.0)[0])
        steps += 1
    assert steps <= 16 * 4  # 16, then 32, 64 ... for as many steps each


def test_once_the_promise_can_be_kept_again_it_is():
    model = fitted()
    budget = LatencyBound(model, promise=1e-3, partial=1)
    for _ in range(100):
        budget.grant(on_board([500], decodes=4), StepLimits(64, 512), 0.0)
    budget.promise = 0.022
    budget.grant(on_board([500], decodes=4), StepLimits(64, 512), 0.0)
    budget.promise = 1e-3
    assert budget.grant(on_board([500], decodes=4), StepLimits(64, 512), 0.0)[0] == LatencyBound.LEAST


def promised(rows: Rows, *tpot: float) -> Rows:
    """What those who decode, the last of them, were promised."""
    table = rows._table
    table.tpot[: len(table)] = np.inf
    table.tpot[len(table) - len(tpot) : len(table)] = tpot
    return rows


@pytest.mark.parametrize(
    ("own", "kept"),
    [((0.012, 0.030), 0.012), ((0.030, 0.030), 0.030), ((0.030, np.inf), 0.022), ((np.inf, np.inf), 0.022)],
)
def test_the_tightest_promise_of_those_who_decode_is_kept(own, kept):
    """2 ms and 0.1 ms a token. Who was promised nothing gets what everybody is promised, 22 ms."""
    budget = LatencyBound(fitted(), promise=0.022, partial=1)
    tokens = budget.grant(promised(on_board([400], decodes=2), *own), StepLimits(64, 512), 0.0)
    fits = (kept - BASE) / PER_TOKEN - 2
    assert 0.9 * fits <= tokens[0] <= fits


def test_a_promise_of_one_whose_prompt_is_computed_binds_nobody_yet():
    rows = on_board([400], decodes=2)
    promised(rows, 0.003, np.inf, np.inf)
    tokens = LatencyBound(fitted(), promise=0.022, partial=1).grant(rows, StepLimits(64, 512), 0.0)
    assert tokens[0] > 150


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(2, 600), max_size=8),
    st.integers(0, 40),
    st.integers(1, 64),
    st.integers(1, 600),
    st.floats(1e-3, 0.1),
    st.integers(1, 4),
)
def test_it_is_a_budget(prompts, decodes, rows, tokens, promise, partial):
    view = on_board(prompts, decodes)
    granted = LatencyBound(MODEL, promise, partial).grant(view, StepLimits(rows, tokens), 0.0)
    assert (granted >= 0).all()
    assert (granted <= view.work).all()
    assert granted.sum() <= tokens
    assert np.count_nonzero(granted) <= rows
    assert granted[view.work == 1].sum() == min(decodes, rows, tokens)
    if prompts or decodes:
        assert granted.sum() > 0
    with_decodes = decodes > 0 and granted.sum() > granted[view.work == 1].sum()
    if with_decodes and granted.sum() - min(decodes, rows, tokens) > LatencyBound.LEAST:
        assert BASE + PER_TOKEN * granted.sum() <= promise * 1.001


def test_the_scheduler_learns_and_keeps_the_promise():
    config = SchedulerConfig(
        budget="latency", tpot_slo=0.012, max_batch_size=8, max_num_batched_tokens=256, batching="continuous"
    )
    world = World(config, num_blocks=400, block_size=16, max_model_len=400)
    executor, taken = world.executor, []

    def launch(batch, launch=executor.launch):
        load = batch.load
        executor.step_time = device(load)
        taken.append((load, executor.step_time))
        return launch(batch)

    executor.launch = launch
    world.run([(i * 0.05, 40 + 90 * (i % 4), 25, 10**6, None) for i in range(60)])
    mixed = [seconds for load, seconds in taken[60:] if load.rows < load.tokens and load.rows > 1]
    assert len(world.finished) == 60
    assert len(mixed) > 50
    within = [seconds <= 0.012 for seconds in mixed]
    assert np.mean(within) > 0.95


def test_a_latency_budget_without_chunks_is_refused():
    with pytest.raises(ValueError, match="chunks"):
        SchedulerConfig(budget="latency", chunked_prefill=False)


def test_a_high_one_pauses_a_low_one_where_rows_are_short():
    """Both rows are taken by low ones that decode: the high one is in the next step, and all get their tokens."""
    config = SchedulerConfig(
        batching="continuous", policy="priority", max_batch_size=2, max_num_seqs=4, max_num_batched_tokens=8, depth=1
    )
    world = World(config, max_model_len=64)
    for handle in (0, 1):
        world.add(handle, prompt_len=4, max_tokens=20, priority=5)
    for _ in range(4):
        world.step()
    low = len(world.tokens[0]), len(world.tokens[1])
    world.add(2, prompt_len=4, max_tokens=3, priority=1)
    world.add(3, prompt_len=4, max_tokens=3, priority=9)
    for _ in range(3):
        world.step()
    assert len(world.tokens[2]) == 3
    assert len(world.tokens[0]) + len(world.tokens[1]) == sum(low) + 3, "one of the two goes on beside it"
    assert len(world.tokens[3]) == 0
    world.drain()
    assert [len(world.tokens[handle]) for handle in range(4)] == [20, 20, 3, 3]
    assert world.finished[1].state_times["wait_policy"] == 3.0
    assert world.scheduler.counters.num_preemptions == 0


def test_a_high_one_gets_the_tokens_before_low_ones_that_decode():
    config = SchedulerConfig(
        batching="continuous", policy="priority", max_batch_size=4, max_num_seqs=8, max_num_batched_tokens=4, depth=1
    )
    world = World(config, max_model_len=64)
    for handle in range(3):
        world.add(handle, prompt_len=1, max_tokens=30, priority=5)
    for _ in range(4):
        world.step()
    world.add(3, prompt_len=8, max_tokens=2, priority=0)
    world.step()
    world.step()
    assert len(world.tokens[3]) == 1, "two steps of four tokens are all its own"
    world.drain()
    assert all(len(world.tokens[handle]) == 30 for handle in range(3))
