"""A high class that arrives pauses a low one: rows, places on board and blocks, whichever is short."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.config import SchedulerConfig
from tests.core.memory import World

LOW, HIGH = 2, 0


def full_of_low_ones(rows: int = 4, *, num_blocks: int = 400, spare: int = 1, **limits) -> World:
    """Every row, and every place on board, is taken by a low one that decodes."""
    config = SchedulerConfig(
        **{
            "policy": "priority",
            "prefix_caching": False,
            "max_batch_size": rows,
            "max_num_seqs": rows,
            "max_num_batched_tokens": 64,
        }
        | limits
    )
    world = World(config, num_blocks, max_model_len=64, num_host_blocks=64, spare_slots=spare)
    for handle in range(rows):
        world.add(handle, prompt_len=6, max_tokens=40, priority=LOW)
    return world


def run_until(world: World, time: float) -> None:
    while world.clock() < time:
        if not world.step():
            world.clock.advance_to(min(time, world.loop.wait_until))


@pytest.mark.parametrize(
    ("batching", "depth", "waits"),
    [("inflight", 2, 1.5), ("inflight", 1, 1.5), ("continuous", 1, 1.5), ("continuous", 2, 2.5)],
)
def test_a_high_one_boards_the_next_step_though_no_place_is_free(batching, depth, waits):
    """Steps of 1 s, an arrival at half of one: the rest of it, and the step that computes its prompt (where the next
    step has been launched ahead, that one, too)."""
    world = full_of_low_ones(batching=batching, depth=depth)
    run_until(world, 20.5)
    world.add(9, prompt_len=5, max_tokens=3, arrival=20.5, priority=HIGH)
    world.drain()
    assert world.finished[9].first_token - 20.5 == pytest.approx(waits)
    assert world.finished[9].preemptions == 0
    assert [len(world.tokens[handle]) for handle in range(4)] == [40] * 4
    assert world.scheduler.counters.num_preemptions == 1
    assert all(len(batch.rows) <= 4 for batch in world.executor.batches)


@pytest.mark.parametrize("policy", ["priority", "aged:priority"])
def test_the_policy_is_told_of_what_was_computed_and_of_nothing_else(policy, monkeypatch):
    """Rows that are taken out of a prepared step have not been served by it."""
    world = full_of_low_ones(policy=policy, batching="inflight", depth=2)
    told, served = [], world.scheduler.strategies.policy.served

    def note(rows, tokens, now):
        told.append(int(tokens.sum()))
        served(rows, tokens, now)

    monkeypatch.setattr(world.scheduler.strategies.policy, "served", note)
    run_until(world, 20.5)
    world.add(9, prompt_len=5, max_tokens=3, arrival=20.5, priority=HIGH)
    world.drain()
    assert min(told) < 0, "nothing was taken back: this shows nothing"
    assert sum(told) == sum(batch.total_tokens for batch in world.executor.batches)


def test_a_high_one_waits_for_no_blocks_that_low_ones_hold():
    world = full_of_low_ones(num_blocks=14, max_num_seqs=8, depth=1)
    run_until(world, 8.5)
    assert world.scheduler.pool.available < 4
    world.add(9, prompt_len=15, max_tokens=3, arrival=8.5, priority=HIGH)
    world.drain()
    assert world.finished[9].first_token - 8.5 <= 1.5
    assert [len(world.tokens[handle]) for handle in range(4)] == [40] * 4


def test_equals_and_lower_ones_pause_nobody():
    world = full_of_low_ones()
    run_until(world, 5.5)
    world.add(8, prompt_len=5, max_tokens=3, priority=LOW)
    world.add(9, prompt_len=5, max_tokens=3, priority=LOW + 1)
    world.drain()
    assert world.scheduler.counters.num_preemptions == 0


def test_nobody_is_paused_for_one_that_would_not_find_blocks_even_so():
    """Two of its own class hold the blocks that it needs; the low one's are too few."""
    world = full_of_low_ones(3, num_blocks=26, depth=1)
    world.abort(1)
    world.abort(2)
    world.add(7, prompt_len=38, max_tokens=8, priority=HIGH)
    world.add(8, prompt_len=30, max_tokens=8, priority=HIGH)
    run_until(world, 3.5)
    world.add(9, prompt_len=40, max_tokens=3, arrival=3.5, priority=HIGH)
    run_until(world, 5.5)
    assert world.scheduler.counters.num_preemptions == 0
    world.drain()
    assert len(world.tokens[9]) == 3


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 20), st.integers(1, 20), st.integers(1, 16), st.integers(1, 24), st.none() | st.floats(0, 20)
        ),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from(["priority", "aged:priority"]),
    st.sampled_from(["inflight", "continuous"]),
    st.sampled_from(["auto", "recompute", "swap"]),
    st.integers(1, 2),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 2),
    st.booleans(),
)
def test_nothing_is_lost_when_classes_displace_each_other(
    plan, policy, batching, preemption, depth, rows, budget, spare, prefix
):
    config = SchedulerConfig(
        batching=batching,
        policy=policy,
        preemption=preemption,
        prefix_caching=prefix,
        max_batch_size=rows,
        max_num_seqs=rows + 1,
        max_num_batched_tokens=rows + budget,
        max_overtaking=40,
        depth=depth,
    )
    world = World(config, num_blocks=14, max_model_len=40, num_host_blocks=8, spare_slots=spare)
    world.run(plan)
    assert set(world.finished) == set(range(len(plan)))
    for batch in world.executor.batches:
        assert len(batch.rows) <= rows
        assert batch.total_tokens <= rows + budget
    for handle, (_, prompt, most, natural, abort) in enumerate(plan):
        if abort is None:
            assert len(world.tokens[handle]) == min(most, natural, 40 - prompt)
    assert world.scheduler.pool.available == world.num_blocks


@pytest.mark.parametrize(("base", "apart"), [(0.0, True), (1.0, False)])
def test_low_ones_pause_for_a_high_prompt_where_that_costs_hardly_anything(base, apart):
    """A step of its own for the prompt costs the base once more."""
    world = full_of_low_ones(batching="continuous", depth=1)
    run_until(world, 8.5)
    model = world.scheduler.step_time
    model._coefficients = (base, 0.01, 0.0, 0.0, 0.0, 0.0)
    world.add(9, prompt_len=5, max_tokens=3, arrival=8.5, priority=HIGH)
    world.step()
    world.step()
    rows = [len(batch.rows) for batch in world.executor.batches if 5 in batch.num_tokens.tolist()]
    assert rows == [1 if apart else 4]
    world.drain()
    assert [len(world.tokens[handle]) for handle in range(4)] == [40] * 4
