"""Stuck states that are really planted: the watchdog names them, and all but those that cannot go on finish."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.core.batch import Wait
from headway.core.config import SchedulerConfig
from headway.core.event_log import replay
from headway.core.formation import Formation
from headway.core.policies import Policy
from headway.core.request import FinishReason
from headway.engine.watchdog import Alarm, Broken, Watchdog
from tests.core.memory import World

CONFIG = SchedulerConfig(
    policy="fcfs", max_batch_size=4, max_num_seqs=4, max_num_batched_tokens=64, depth=1, prefix_caching=False
)
PATIENCE = 10.0


class Shut(Formation):
    """Never lets anyone in."""

    def may_join(self, queue, board, more, now):
        return 0


class Later(Formation):
    """Always says that it will be open soon."""

    def may_join(self, queue, board, more, now):
        return Wait(now + 3.0, "in a moment")


class Broke:
    """A budget that has no tokens for anybody."""

    def openings(self, ready, left):
        return left.rows

    def grant(self, rows, left, now):
        return np.zeros(len(rows), np.int32)


def run(world: World, limit: int = 2000) -> list[tuple[float, Alarm]]:
    """As the engine process does: when there is nothing to do the watchdog looks, and time passes. Until all ended."""
    watchdog, alarms = Watchdog(world.loop, PATIENCE), []
    for _ in range(limit):
        if world.loop.idle:
            return alarms
        if world.step():
            continue
        alarm = watchdog.look()
        if alarm is not None:
            alarms.append((world.clock(), alarm))
            world.note(alarm.ended)
            continue
        until = min(world.loop.wait_until, watchdog.due)
        assert until < math.inf, "nobody would ever look again"
        world.clock.advance_to(until)
    raise AssertionError("it does not end")


def check(world: World, failed: tuple[int, ...] = ()) -> None:
    """All have ended, with the tokens that they would have got anyhow; the log leads to the same batches."""
    errors = {handle for handle, end in world.finished.items() if end.reason is FinishReason.ERROR}
    assert errors == set(failed)
    assert set(world.finished) == set(world.tokens)
    for handle, end in world.finished.items():
        if handle not in failed:
            assert end.reason is FinishReason.LENGTH
        assert sum(end.state_times.values()) == pytest.approx(end.finished - end.arrival)
    world.scheduler.check()
    assert world.scheduler.pool.available == world.num_blocks


def test_a_formation_that_lets_nobody_in():
    world = World(CONFIG)
    world.scheduler.strategies.formation = Shut()
    for handle in range(6):
        world.add(handle, prompt_len=4, max_tokens=3)
    ((at, alarm),) = run(world)
    assert at == PATIENCE
    assert "6 wait_row" in alarm.line
    assert "batching is continuous" in alarm.line
    assert "Shut" in alarm.dump
    assert all(f"r{handle}, waiting, wait_row" in alarm.dump for handle in range(6))
    check(world)
    assert world.scheduler.config.batching == "continuous"


def test_a_formation_that_waits_for_ever():
    """The first promise is waited for; that it is broken again and again helps nobody."""
    world = World(CONFIG)
    world.scheduler.strategies.formation = Later()
    world.add(0, prompt_len=4, max_tokens=3)
    ((at, alarm),) = run(world)
    assert at == 3.0 + PATIENCE
    assert "1 wait_window (in a moment)" in alarm.line
    check(world)


def test_a_policy_that_is_in_the_way():
    """The plain ones are the configured ones already, by name: what stands in their place is replaced all the same."""

    class Outranked(Policy):
        def score(self, queue, now):
            return np.zeros(len(queue))

    config = SchedulerConfig(batching="continuous", policy="fcfs", max_batch_size=4, max_num_batched_tokens=64)
    world = World(config)
    world.scheduler.strategies.policy = Outranked()
    world.scheduler.strategies.budget = Broke()
    world.add(0, prompt_len=4, max_tokens=3)
    ((_, alarm),) = run(world)
    assert "Outranked, Broke" in alarm.dump
    assert not isinstance(world.scheduler.strategies.policy, Outranked)
    check(world)


def starving(count: int) -> World:
    """Rows on board that each lack a block while none is free, and nobody can be evicted."""
    world = World(CONFIG, num_blocks=4 * count, block_size=4)
    world.scheduler._lineup._room.evict = lambda *args: (0, 0)
    for handle in range(count):
        world.add(handle, prompt_len=12, max_tokens=8)
    return world


def test_rows_that_starve_each_other():
    """Five blocks are needed by each, four are there for each."""
    world = starving(3)
    alarms = [alarm for _, alarm in run(world)]
    assert "on board: 3 wait_blocks" in alarms[0].line
    assert "2 of those on board have lost their places" in alarms[1].line
    check(world)
    assert replay_is_the_same(world)


def test_one_that_cannot_go_on_is_failed_and_the_others_finish():
    """Its memory is withheld from the first for good: not even alone can it go on."""
    world = World(CONFIG, num_blocks=20)
    give = world.scheduler._lineup._room.for_board
    world.scheduler._lineup._room.extend = lambda rows, tokens: None
    world.scheduler._decode.launch = lambda step_id, now: None

    def withheld(rows, need, now):
        return give(rows, need, now) & (world.scheduler.table.handle[rows] != 0)

    world.scheduler._lineup._room.for_board = withheld
    for handle in range(3):
        world.add(handle, prompt_len=4, max_tokens=3)
    alarms = [alarm for _, alarm in run(world)]
    assert [alarm.ended is not None for alarm in alarms] == [False, True]
    assert "request r0 is failed" in alarms[-1].line
    check(world, failed=(0,))
    assert "could not go on" in world.finished[0].message


def test_if_nobody_can_go_on_all_are_failed():
    world = World(CONFIG)
    world.scheduler._lineup.joining = lambda *args: (np.zeros(0, np.int64), math.inf)
    for handle in range(3):
        world.add(handle, prompt_len=4, max_tokens=3)
    run(world)
    check(world, failed=(0, 1, 2))


def test_books_that_do_not_add_up_end_it():
    world = World(CONFIG)
    world.scheduler.strategies.formation = Shut()
    world.add(0, prompt_len=4, max_tokens=3)
    world.scheduler.waiting.discard(world.scheduler.table.row_of(0))
    world.scheduler.waiting.add(200)
    watchdog = Watchdog(world.loop, PATIENCE)
    assert watchdog.look() is None
    world.clock.advance_to(PATIENCE)
    with pytest.raises(Broken, match="do not add up"):
        watchdog.look()


def test_no_alarm_where_nothing_is_wrong():
    """A long window, a step of an hour, and a server with nothing to do."""
    window = SchedulerConfig(batching="static", static_timeout=300.0, max_batch_size=4, depth=1)
    world = World(window)
    world.add(0, prompt_len=4, max_tokens=3)
    assert run(world) == []
    assert world.clock() == 303.0
    slow = World(CONFIG, step_time=3600.0)
    for handle in range(9):
        slow.add(handle, prompt_len=4, max_tokens=3)
    assert run(slow) == []
    watchdog = Watchdog(slow.loop, PATIENCE)
    slow.clock.advance_to(10**6)
    assert watchdog.look() is None
    assert watchdog.due == math.inf


def replay_is_the_same(world: World) -> bool:
    fresh = world.fresh_scheduler()
    fresh._lineup._room.evict = lambda *args: (0, 0)
    again = replay(world.events, fresh)
    batches = world.executor.batches
    return len(again) == len(batches) and all(
        np.array_equal(one.rows, two.rows) and np.array_equal(one.block_ids, two.block_ids)
        for one, two in zip(again, batches, strict=True)
    )
