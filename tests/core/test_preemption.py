"""Preemption: who leaves, what becomes of its KV, and that everybody finishes at last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.config import SchedulerConfig
from headway.core.policies import POLICIES
from headway.core.preemption import LeastLoss, Pressure
from headway.core.request import FinishReason
from headway.core.step_time import StepTimeModel
from headway.core.strategies import FORMATIONS, PREEMPTIONS, RESERVATIONS
from headway.core.swap import CopyTime, HostPool
from headway.core.table import RequestTable, Rows
from tests.core.memory import World

policies = st.sampled_from([*POLICIES, "aged:priority", "aged:srpt"])


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 18)), min_size=2, max_size=8),
    policies,
    st.sampled_from(sorted(FORMATIONS)),
    st.sampled_from(sorted(PREEMPTIONS)),
    st.sampled_from(sorted(RESERVATIONS)),
    st.integers(1, 2),
    st.integers(1, 8),
    st.booleans(),
    st.integers(0, 3),
)
def test_everybody_finishes_in_a_pool_that_holds_one(
    lengths, policy, batching, preemption, reservation, depth, block_size, prefix, more
):
    """No livelock: the pool holds the longest request and hardly more, and all of them want it at once."""
    longest = max(prompt + answer - 1 for prompt, answer in lengths)
    config = SchedulerConfig(
        batching=batching,
        policy=policy,
        preemption=preemption,
        kv_reservation=reservation,
        prefix_caching=prefix,
        max_batch_size=4,
        max_num_batched_tokens=8,
        depth=depth,
    )
    blocks = -(-longest // block_size) + more
    world = World(config, blocks, block_size, max_model_len=40, num_host_blocks=2 * blocks, spare_slots=1)
    for handle, (prompt, answer) in enumerate(lengths):
        world.add(handle, prompt, answer)
    work = sum(prompt + answer for prompt, answer in lengths)
    world.drain(limit=100 + 40 * work)
    assert [len(world.tokens[handle]) for handle in range(len(lengths))] == [answer for _, answer in lengths]
    if reservation == "full":
        assert world.scheduler.counters.num_preemptions == 0 or policy in ("priority", "aged:priority")


def two_that_do_not_fit(**changes) -> World:
    """Ten blocks of four tokens; both want eight before they end."""
    config = SchedulerConfig(
        policy="fcfs", prefix_caching=False, max_batch_size=4, max_num_batched_tokens=64, depth=1, **changes
    )
    world = World(config, num_blocks=10, max_model_len=40, num_host_blocks=10)
    world.add(0, prompt_len=10, max_tokens=20)
    world.add(1, prompt_len=12, max_tokens=20)
    return world


@pytest.mark.parametrize("depth", [1, 2])
def test_who_was_swapped_out_comes_back_without_computing_anything_again(depth):
    world = two_that_do_not_fit(preemption="swap")
    world.scheduler.follow(replace(world.config, depth=depth), 0.0)
    world.drain()
    counters = world.scheduler.counters
    assert counters.num_preemptions == counters.num_swaps > 0
    assert counters.num_recomputed_tokens == 0
    computed = sum(int(batch.num_tokens.sum()) for batch in world.executor.batches)
    assert computed == 10 + 12 + 2 * 19, "each token but the last once"
    assert counters.num_swapped_blocks == sum(len(batch.swaps) for batch in world.executor.batches)
    assert world.finished[1].state_times["swapped"] > 0
    assert "preempted" not in world.finished[1].state_times


def test_without_room_on_the_host_it_is_computed_again():
    world = two_that_do_not_fit(preemption="swap")
    world.scheduler.host.reserve(-1, 9)
    world.scheduler.check = lambda: None  # type: ignore[method-assign]
    world.drain()
    counters = world.scheduler.counters
    assert (counters.num_swaps, counters.num_recomputed_tokens > 0) == (0, True)
    assert world.finished[1].state_times["preempted"] > 0


def test_aborting_who_is_swapped_out_gives_its_host_blocks_back():
    world = two_that_do_not_fit(preemption="swap")
    while not world.scheduler.host.rows:
        world.step()
    world.abort(1)
    world.drain()
    world.scheduler.host.settle()
    assert world.scheduler.host.available == 10
    assert world.finished[1].reason is FinishReason.ABORT


def test_a_failed_copy_out_is_computed_again():
    """The step that copies it out fails: who is in the step ends, who was copied out is computed anew."""
    world = two_that_do_not_fit(preemption="swap")
    collect, launch = world.executor.collect, world.executor.launch

    def failing_launch(batch):
        ticket = launch(batch)
        if len(batch.swaps.out_host):
            world.executor.host.clear()
            world.executor.collect = failing_collect
        return ticket

    def failing_collect(ticket):
        world.executor.collect = collect
        collect(ticket)
        raise RuntimeError("the device is on fire")

    world.executor.launch = failing_launch
    world.drain()
    assert world.finished[0].reason is FinishReason.ERROR
    assert world.finished[1].reason is FinishReason.LENGTH
    assert world.scheduler.counters.num_recomputed_tokens > 0


def test_full_reservation_never_preempts_and_predicted_seldom():
    plan = [(0.3 * i, 6 + i % 9, 24, 4 + i * 7 % 20, None) for i in range(60)]
    preemptions = {}
    for reservation in RESERVATIONS:
        config = SchedulerConfig(
            kv_reservation=reservation, prefix_caching=False, max_batch_size=8, max_num_batched_tokens=32, depth=1
        )
        world = World(config, num_blocks=30, max_model_len=48)
        world.run(plan)
        preemptions[reservation] = world.scheduler.counters.num_preemptions
        assert len(world.finished) == 60
    assert preemptions["full"] == 0
    assert preemptions["predicted"] < preemptions["optimistic"]


def model(**coefficients: float) -> StepTimeModel:
    """A fitted model: seconds per token, and nothing else unless given."""
    made = StepTimeModel()
    names = ("base", "token", "attended", "row", "kv", "over")
    made._coefficients = tuple(({"token": 1e-3} | coefficients).get(name, 0.0) for name in names)
    return made


def rows(computed: list[int], guarded: list[int] | None = None) -> Rows:
    table = RequestTable()
    index = np.arange(len(computed))
    table.computed[index] = computed
    table.guarded_until[index] = guarded or 0
    table.step = 10
    return Rows(table, index, 0.0)


def pressure(gains: list[int], wanted: int, kept: list[int] | None = None, host: int = 0, **more) -> Pressure:
    held = np.array(kept or [0] * len(gains), np.int32)
    return Pressure(np.array(gains, np.int32), held, wanted, host, 4, **more)


def test_the_victim_is_who_loses_least_per_block():
    who = LeastLoss(model()).victims
    assert who(rows([40, 37, 40]), pressure([10, 10, 10], 2), 0.0) == [(1, False)]  # its last block is hardly used
    assert who(rows([40, 40, 40]), pressure([10, 10, 10], 2), 0.0) == [(2, False)]  # of equals, the last in order
    # Others hold the beginning of row 0, too: it frees five blocks only, but of its 40 tokens it finds 30 again.
    assert who(rows([40, 44]), pressure([5, 11], 2, kept=[30, 0]), 0.0) == [(0, False)]
    longer = LeastLoss(model(attended=1e-3)).victims
    assert longer(rows([400, 40, 400]), pressure([100, 10, 100], 2), 0.0) == [(1, False)]  # prompts cost by the square


def test_nobody_leaves_whose_leaving_turns_out_not_to_be_needed():
    """The best two by loss per block do not suffice; the third alone would have."""
    chosen = LeastLoss(model()).victims(rows([4, 8, 80]), pressure([2, 2, 20], 12), 0.0)
    assert chosen == [(2, False)]


def test_who_has_just_come_back_leaves_only_if_nothing_else_helps():
    who = LeastLoss(model()).victims
    assert who(rows([8, 80], guarded=[20, 0]), pressure([2, 20], 2), 0.0) == [(1, False)]
    assert sorted(who(rows([8, 80], guarded=[20, 0]), pressure([2, 20], 22), 0.0)) == [(0, False), (1, False)]


def test_auto_takes_the_cheaper_way_for_each():
    """A copy of a block costs 10 ms: rows of few tokens are computed again, in 1 ms a token."""
    made = model(attended=1e-5)
    for _ in range(100):
        made.copies.observe(10, 0.1)
    assert made.copies.per_block == pytest.approx(0.01)
    who = LeastLoss(made).victims
    assert who(rows([400]), pressure([100], 1, host=100), 0.0) == [(0, False)]  # 1.2 s against 2 s
    assert who(rows([4000]), pressure([1000], 1, host=1000), 0.0) == [(0, True)]  # 84 s against 20 s
    assert who(rows([4000]), pressure([1000], 1, host=999), 0.0) == [(0, False)]  # the host is full
    assert LeastLoss(made, swap=False).victims(rows([4000]), pressure([1000], 1, host=1000), 0.0) == [(0, False)]
    assert LeastLoss(made, swap=True).victims(rows([400]), pressure([100], 1, host=100), 0.0) == [(0, True)]


def test_nobody_leaves_where_bringing_them_back_costs_more_than_it_may():
    who = LeastLoss(model()).victims
    assert who(rows([40]), pressure([10], 2, limit=0.03), 0.0) == []
    assert who(rows([40]), pressure([10], 2, limit=0.05), 0.0) == [(0, False)]


def test_host_blocks_can_be_had_again_in_the_next_step_only():
    """A step copies out before it copies in: what comes in must not be overwritten by what goes out beside it."""
    host = HostPool(4)
    assert host.reserve(7, 3)
    assert not host.reserve(8, 2)
    host.copy_out(7, np.array([10, 11, 12], np.int32))
    swaps, out = host.copies()
    assert (out, swaps.out_device.tolist(), len(swaps.in_host)) == ((7,), [10, 11, 12], 0)
    host.copy_in(7, 1, np.array([5, 6], np.int32))
    again, _ = host.copies()
    assert again.in_host.tolist() == swaps.out_host.tolist()[1:]
    assert host.available == 1
    host.check()
    host.settle()
    assert host.available == 4
    host.check()


def test_who_returns_in_the_step_that_copies_it_out_is_copied_out_all_the_same():
    host = HostPool(2)
    host.reserve(7, 2)
    host.copy_out(7, np.array([10, 11], np.int32))
    host.copy_in(7, 0, np.array([5, 6], np.int32))
    swaps, _ = host.copies()
    assert swaps.out_host.tolist() == swaps.in_host.tolist()
    assert (swaps.out_device.tolist(), swaps.in_device.tolist()) == ([10, 11], [5, 6])


def test_the_time_of_a_copy_follows_the_device():
    time = CopyTime()
    assert time.per_block == 0.0
    time.observe(4, 0.4)
    assert time.per_block == pytest.approx(0.1)
    for _ in range(200):
        time.observe(4, 0.04)
    assert time.per_block == pytest.approx(0.01, rel=0.01)
