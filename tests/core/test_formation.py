"""Formations: when requests join, what padding costs, and who passes whom."""

from __future__ import annotations

import pytest

from headway.core.config import SchedulerConfig
from headway.core.step_time import StepTimeModel
from tests.core.memory import World


def config(batching: str, **limits) -> SchedulerConfig:
    return SchedulerConfig(
        **{"batching": batching, "max_batch_size": 4, "max_num_batched_tokens": 64, "depth": 1} | limits
    )


def joins(world: World) -> list[int]:
    """How many joined in each step."""
    return [len(batch.admitted) for batch in world.executor.batches]


def test_a_static_batch_is_a_rectangle_until_all_have_ended():
    world = World(config("static"), num_blocks=400, max_model_len=64)
    for handle, (prompt_len, natural) in enumerate([(3, 2), (9, 5), (5, 1), (9, 3)]):
        world.add(handle, prompt_len, max_tokens=10, natural=natural)
    world.drain()
    batches = world.executor.batches
    assert len(batches) == 5  # as many as the longest answer takes
    first = batches[0]
    assert (first.num_tokens + first.pad_tokens).tolist() == [9] * 4
    for batch in batches[1:]:
        assert (batch.num_tokens + batch.pad_tokens).tolist() == [1] * 4  # the ended ones are computed on
    assert sum(int(batch.num_tokens.sum()) for batch in batches[1:]) == 1 + 4 + 0 + 2
    assert world.scheduler.counters.num_pad_tokens == (6 + 0 + 4 + 0) + (3 + 0 + 4 + 2)
    assert [len(world.tokens[h]) for h in range(4)] == [2, 5, 1, 3]


def test_a_static_group_holds_the_rectangle_of_kv():
    world = World(config("static"), num_blocks=400, block_size=4, max_model_len=64)
    for handle, (prompt_len, max_tokens) in enumerate([(8, 4), (20, 12)]):
        world.add(handle, prompt_len, max_tokens)
    world.scheduler.no_more(0.0)
    world.step()
    assert 400 - world.scheduler.pool.available == 2 * (20 + 12) // 4


def test_a_static_group_that_would_not_fit_together_is_made_smaller():
    world = World(config("static"), num_blocks=16, block_size=4, max_model_len=64)
    for handle in range(4):
        world.add(handle, prompt_len=16, max_tokens=16)
    world.drain()
    assert joins(world)[0] == 2
    assert len(world.finished) == 4


def test_nobody_joins_a_static_group_on_its_way():
    world = World(config("static", static_timeout=0.0), num_blocks=400, max_model_len=64)
    world.add(0, prompt_len=4, max_tokens=6)
    world.step()
    world.add(1, prompt_len=4, max_tokens=2)
    world.drain()
    assert joins(world) == [1, 0, 0, 0, 0, 0, 1, 0]
    assert world.finished[1].state_times["wait_window"] == pytest.approx(5.0)


@pytest.mark.parametrize(("batching", "window"), [("static", 7.0), ("dynamic", 2.0)])
def test_an_unfull_group_leaves_when_its_window_closes(batching, window):
    world = World(config(batching, static_timeout=7.0, max_wait=2.0), max_model_len=64)
    world.add(0, prompt_len=4, max_tokens=1)
    world.clock.advance_to(1.0)
    world.add(1, prompt_len=4, max_tokens=1)
    assert not world.step()
    assert world.loop.wait_until == window  # counted from the first that waits
    world.clock.advance_to(window)
    assert world.step()
    assert joins(world) == [2]


def test_a_full_group_does_not_wait():
    world = World(config("dynamic", max_wait=100.0), max_model_len=64)
    for handle in range(5):
        world.add(handle, prompt_len=4, max_tokens=1)
    assert world.step()
    assert joins(world) == [4]


def test_a_closed_workload_flushes_the_last_group():
    world = World(config("static", static_timeout=100.0), max_model_len=64)
    world.add(0, prompt_len=4, max_tokens=1)
    assert not world.step()
    world.scheduler.no_more(world.clock())
    assert world.step()


@pytest.mark.parametrize(
    ("batching", "depth", "waits"), [("inflight", 2, 1.5), ("continuous", 1, 1.5), ("continuous", 2, 2.5)]
)
def test_who_comes_during_a_step_boards_the_next_one(batching, depth, waits):
    """Steps of 1 s, an arrival at half of one. In flight it takes the next step, as with nothing prepared; a step that
    has been launched ahead it misses."""
    world = World(config(batching, depth=depth), num_blocks=400, max_model_len=64)
    world.run([(0.0, 4, 40, 10**6, None), (20.5, 4, 2, 10**6, None)])
    assert world.finished[1].first_token - 20.5 == pytest.approx(waits)
    assert world.loop.stats().host_gap == 0.0


@pytest.mark.parametrize("too_much", [1.5, 1e6])
def test_a_prediction_that_is_far_too_long_holds_nobody_up(too_much, monkeypatch):
    """The launch is held until the step is expected to end, but not when it has ended: 40 steps take 40 s."""
    monkeypatch.setattr(StepTimeModel, "at_least", lambda self, load: too_much)
    world = World(config("inflight", depth=2), num_blocks=400, max_model_len=64)
    world.run([(0.0, 4, 40, 10**6, None), (20.5, 4, 2, 10**6, None)])
    assert world.finished[0].finished == pytest.approx(40.0, rel=0.011)
    assert world.finished[1].first_token - 20.5 < 1.7


def test_shorter_ones_pass_a_giant_that_does_not_fit_and_give_way_once_it_does():
    strict = World(
        config("continuous", policy="fcfs", backfill=False, max_batch_size=8, max_num_batched_tokens=256),
        num_blocks=64,
        block_size=4,
        max_model_len=256,
    )
    backfill = World(
        config("continuous", policy="fcfs", max_batch_size=8, max_num_batched_tokens=256),
        num_blocks=64,
        block_size=4,
        max_model_len=256,
    )
    for world in (strict, backfill):
        world.add(0, prompt_len=160, max_tokens=16)  # holds 40 blocks, for 16 steps
        world.step()
        world.add(1, prompt_len=180, max_tokens=4)  # the giant: 45 blocks, of which 21 are not there
        for handle in range(2, 6):
            world.add(handle, prompt_len=8, max_tokens=30)
        world.drain()
    for handle in range(2, 6):
        assert backfill.finished[handle].first_token < 3 < strict.finished[handle].first_token
    assert backfill.finished[1].first_token <= strict.finished[1].first_token
    assert backfill.scheduler.counters.num_preemptions > 0


def test_whoever_passed_is_not_evicted_in_vain():
    world = World(config("continuous", max_batch_size=8), num_blocks=24, block_size=4, max_model_len=96)
    world.add(0, prompt_len=60, max_tokens=16)
    world.step()
    world.add(1, prompt_len=64, max_tokens=4)
    world.add(2, prompt_len=8, max_tokens=8)
    world.drain()
    assert world.scheduler.counters.num_preemptions == 0
