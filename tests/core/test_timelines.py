"""Where the time goes: planted situations with truths computed by hand, and that timelines have no gaps whatever comes.

A step takes one second, so that times are counted in steps.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from headway.core.accounting import State
from headway.core.config import SchedulerConfig
from headway.core.policies import POLICIES
from headway.core.tenants import Tenant
from headway.core.timeline import FIRST, MOST, Lane, Mark, note, spans, sums
from tests.core.memory import World
from tests.core.test_scheduler import configs, enough, requests

CONFIG = SchedulerConfig(
    batching="continuous",
    policy="fcfs",
    max_batch_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    depth=1,
    prefix_caching=False,
)

CLASSES = ("realtime", "batch")


def config(**changes) -> SchedulerConfig:
    return replace(CONFIG, **changes)


def story(world: World, handle: int) -> list[tuple]:
    """(state, start, end, tokens, detail) of a finished request."""
    return [(s.state, s.start, s.end, s.tokens, s.detail) for s in world.finished[handle].timeline]


def waiting(world: World, handle: int) -> str:
    """What a live request does at this moment."""
    return world.scheduler.timeline(handle, world.clock() + 0.5)[-1].state


# -- planted situations -----------------------------------------------------------------------------------------------


def test_no_row():
    world = World(config(max_batch_size=1, max_num_seqs=1))
    world.add(0, prompt_len=4, max_tokens=6)
    world.add(1, prompt_len=4, max_tokens=2)
    world.drain()
    assert story(world, 0) == [("prefill", 0, 1, 4, ""), ("decode", 1, 6, 5, "")]
    assert story(world, 1) == [
        ("wait_row", 0, 6, 0, "max_batch_size"),
        ("prefill", 6, 7, 4, ""),
        ("decode", 7, 8, 1, ""),
    ]
    assert [(span.first_step, span.last_step) for span in world.finished[1].timeline] == [(1, 6), (7, 7), (8, 8)]


def test_no_row_says_which_limit():
    world = World(config(max_batch_size=2, max_num_seqs=2, burst_size=1))
    for handle in range(2):
        world.add(handle, prompt_len=4, max_tokens=3)
    world.drain()
    assert story(world, 1)[0] == ("wait_row", 0, 1, 0, "burst_size")


def test_no_block():
    """Sixteen blocks of four. The first takes eleven in the end, so that the second, which needs fifteen, waits for all
    of its six steps; a third that fits, and is small beside what the second lacks, passes it."""
    world = World(config(backfill=True, max_num_batched_tokens=64), num_blocks=16, block_size=4)
    world.add(0, prompt_len=38, max_tokens=6)
    world.add(1, prompt_len=60, max_tokens=2)
    world.add(2, prompt_len=3, max_tokens=2)
    world.drain()
    assert story(world, 1)[0] == ("wait_blocks", 0, 6, 0, "")
    assert sums(world.finished[2].timeline) == {"prefill": 1, "decode": 1}


def test_no_block_on_board():
    """Both are on board with two blocks of four each and need a third one at the same time: there is one, and it goes
    to the first. The second, which is not evicted since nobody gains by it, waits until the first has ended."""
    world = World(config(), num_blocks=5, block_size=4)
    world.add(0, prompt_len=7, max_tokens=5)
    world.add(1, prompt_len=7, max_tokens=3)
    world.drain()
    assert story(world, 1) == [
        ("prefill", 0, 1, 7, ""),
        ("decode", 1, 2, 1, ""),
        ("wait_blocks", 2, 5, 0, ""),
        ("decode", 5, 6, 1, ""),
    ]


def test_budget():
    """Ten tokens a step: the first prompt takes them all in two steps, and the second has a row but no tokens."""
    world = World(config(max_num_batched_tokens=10, max_num_partial_prefills=1))
    world.add(0, prompt_len=20, max_tokens=2)
    world.add(1, prompt_len=9, max_tokens=2)
    world.drain()
    assert story(world, 1) == [
        ("wait_budget", 0, 2, 0, "max_num_batched_tokens"),
        ("prefill", 2, 3, 9, ""),
        ("decode", 3, 4, 1, ""),
    ]


def test_window():
    """A group of four is waited for five seconds; the second request has come after two."""
    world = World(config(batching="static", static_timeout=5.0))
    world.add(0, prompt_len=4, max_tokens=1)
    assert not world.step()
    world.clock.advance_to(2.0)
    world.add(1, prompt_len=4, max_tokens=1)
    assert not world.step()
    world.clock.advance_to(5.0)
    world.step()
    detail = "the group is not full and its window is open"
    assert story(world, 0) == [("wait_window", 0, 5, 0, detail), ("prefill", 5, 6, 4, "")]
    assert story(world, 1) == [("wait_window", 2, 5, 0, detail), ("prefill", 5, 6, 4, "")]


def test_class_cadence():
    """One is admitted in each step; twenty realtime requests and one of class batch wait. That one comes in step 10,
    the first that is its class's turn; the realtime ones wait because only one a step is admitted."""
    world = World(
        config(policy="classes", max_batch_size=32, max_num_seqs=32, burst_size=1),
        num_blocks=400,
    )
    world.add(0, prompt_len=4, max_tokens=1, request_class="batch")
    for handle in range(1, 21):
        world.add(handle, prompt_len=4, max_tokens=1, request_class="realtime")
    world.step()
    assert waiting(world, 0) == "wait_cadence"
    assert waiting(world, 20) == "wait_row"
    assert world.scheduler.waiting_by_reason() == {"wait_cadence": 1, "wait_row": 19}
    world.drain()
    assert story(world, 0)[0] == ("wait_cadence", 0, 9, 0, "another class waits")
    assert story(world, 0)[1][:3] == ("prefill", 9, 10)
    assert story(world, 20)[0] == ("wait_row", 0, 20, 0, "burst_size")


def test_a_class_whose_turn_it_is_not_waits_for_a_row_where_no_other_waits():
    world = World(config(policy="classes", max_batch_size=1, max_num_seqs=1))
    for handle in range(2):
        world.add(handle, prompt_len=4, max_tokens=5, request_class="batch")
    world.drain()
    assert story(world, 1)[0] == ("wait_row", 0, 5, 0, "max_batch_size")


def test_preempted():
    """Nine blocks of four. At second 5 both need their fifth, and there is one, which the first gets. At second 9 that
    needs a sixth: the second is evicted. It comes back when the first has ended, and computes its 16 tokens again
    together with the one that it has not computed yet."""
    world = World(config(), num_blocks=9, block_size=4)
    world.add(0, prompt_len=12, max_tokens=12)
    world.add(1, prompt_len=12, max_tokens=9)
    world.drain()
    assert story(world, 0) == [("prefill", 0, 1, 12, ""), ("decode", 1, 12, 11, "")]
    assert story(world, 1) == [
        ("prefill", 0, 1, 12, ""),
        ("decode", 1, 5, 4, ""),
        ("wait_blocks", 5, 9, 0, ""),
        ("preempted", 9, 12, 0, ""),
        ("prefill", 12, 13, 17, ""),
        ("decode", 13, 16, 3, ""),
    ]
    assert world.scheduler.counters.num_recomputed_tokens == 16


def test_swapped():
    """As before, but what the second had computed is copied to the host and back: nothing is computed again."""
    world = World(config(preemption="swap"), num_blocks=9, block_size=4, num_host_blocks=4)
    world.add(0, prompt_len=12, max_tokens=12)
    world.add(1, prompt_len=12, max_tokens=9)
    world.drain()
    assert story(world, 1) == [
        ("prefill", 0, 1, 12, ""),
        ("decode", 1, 5, 4, ""),
        ("wait_blocks", 5, 9, 0, ""),
        ("swapped", 9, 12, 0, ""),
        ("decode", 12, 16, 4, ""),
    ]
    assert world.scheduler.counters.num_recomputed_tokens == 0


def test_quota():
    """One of tenant a may be in flight: its second waits outside until that has ended; tenant b does not notice."""
    world = World(config(tenants={"a": Tenant(max_in_flight=1)}))
    for handle, tenant in enumerate("aab"):
        world.add(handle, prompt_len=4, max_tokens=3, tenant=tenant)
    world.drain()
    assert story(world, 0) == story(world, 2) == [("prefill", 0, 1, 4, ""), ("decode", 1, 3, 2, "")]
    assert story(world, 1) == [("wait_quota", 0, 3, 0, "in_flight"), ("prefill", 3, 4, 4, ""), ("decode", 4, 6, 2, "")]


def test_held_back_in_the_queue():
    """One row. The low one has come first; two high ones take the places that it and the next one would have had."""
    world = World(config(policy="priority", max_batch_size=1, max_num_seqs=1))
    world.add(0, prompt_len=4, max_tokens=3, priority=0)
    world.step()
    world.add(1, prompt_len=4, max_tokens=1, priority=9)
    world.add(2, prompt_len=4, max_tokens=1, priority=9)
    world.add(3, prompt_len=4, max_tokens=2, priority=1)
    world.drain()
    later = "later ones went first"
    assert story(world, 1)[:2] == [("wait_row", 1, 3, 0, "max_batch_size"), ("wait_policy", 3, 5, 0, later)]
    # When the first of the low ones got its place, the second one's had gone to the high one.
    assert story(world, 2)[:2] == [("wait_row", 1, 5, 0, "max_batch_size"), ("wait_policy", 5, 6, 0, later)]
    assert story(world, 3)[0] == ("wait_row", 1, 3, 0, "max_batch_size")


def test_paused_on_board_for_a_better_rank():
    world = World(config(policy="priority", max_batch_size=2, max_num_seqs=4, max_num_batched_tokens=8))
    for handle in (0, 1):
        world.add(handle, prompt_len=4, max_tokens=8, priority=5)
    for _ in range(3):
        world.step()
    world.add(2, prompt_len=4, max_tokens=3, priority=1)
    world.drain()
    assert story(world, 1) == [
        ("prefill", 0, 1, 4, ""),
        ("decode", 1, 3, 2, ""),
        ("wait_policy", 3, 6, 0, "a better rank goes first"),
        ("decode", 6, 11, 5, ""),
    ]


def test_different_rows_of_the_queue_wait_for_different_things_at_one_time():
    """The first of the queue lacks blocks, the second has been passed by a later one, and the last only lacks a row."""
    world = World(config(policy="sjf", max_batch_size=2, max_num_seqs=2, backfill=False), num_blocks=9, block_size=4)
    world.add(0, prompt_len=20, max_tokens=9)
    world.step()
    world.add(1, prompt_len=24, max_tokens=2)
    world.add(2, prompt_len=4, max_tokens=3)
    world.step()
    world.add(3, prompt_len=28, max_tokens=5)
    assert waiting(world, 1) == "wait_policy"
    world.step()
    assert waiting(world, 1) == "wait_policy"
    assert waiting(world, 3) == "wait_row"
    for _ in range(2):
        world.step()
    assert waiting(world, 1) == "wait_blocks"
    world.drain()


def test_one_that_is_held_out_of_the_queue_has_its_own_reason_and_takes_nobodys_place():
    """One row. The second is taken out of the queue until second 4; the third gets the place that it does not want."""
    world = World(config(max_batch_size=1, max_num_seqs=1))
    for handle in range(3):
        world.add(handle, prompt_len=4, max_tokens=3)
    scheduler = world.scheduler
    held = scheduler.table.row_of(1)
    scheduler.waiting.discard(held)
    scheduler.accounting.hold(held, State.WAIT_POLICY, world.clock(), "for a while")
    for _ in range(4):
        world.loop.step()
    scheduler.waiting.add(held)
    scheduler.accounting.release(held, world.clock())
    world.drain()
    assert story(world, 1)[:3] == [
        ("wait_policy", 0, 4, 0, "for a while"),
        ("wait_row", 4, 6, 0, "max_batch_size"),
        ("prefill", 6, 7, 4, ""),
    ]
    assert story(world, 2)[0] == ("wait_row", 0, 3, 0, "max_batch_size")


# -- whatever comes ---------------------------------------------------------------------------------------------------


@settings(max_examples=120, deadline=None)
@given(configs, requests)
def test_timelines_have_no_gaps_and_sum_to_the_whole(config, plan):
    for policy in ("default", "priority", "classes"):
        world = World(replace(config, policy=policy), enough(plan, 12, 4), 4, max_model_len=40)
        world.classes = CLASSES
        world.run(plan)
        for handle, (arrival, prompt_len, *_) in enumerate(plan):
            end = world.finished[handle]
            check_timeline(end, arrival)
            if end.preemptions == 0 and end.output_len:
                computed = sum(span.tokens for span in end.timeline)
                assert computed == prompt_len + end.output_len - 1 - end.cached_len


def check_timeline(end, arrival: float) -> None:
    timeline = end.timeline
    assert timeline or end.finished == arrival
    if timeline:
        assert timeline[0].start == arrival
        assert timeline[-1].end == end.finished
    for one, two in itertools.pairwise(timeline):
        assert one.end == two.start
        assert (one.state, one.detail) != (two.state, two.detail)
        assert one.last_step < two.first_step
    assert all(span.end > span.start and span.tokens >= 0 for span in timeline)
    computing = ("prefill", "decode", "several", "preempted")  # the last: by a step that was launched before
    assert all(span.tokens == 0 for span in timeline if span.state not in computing)
    assert sum(end.state_times.values()) == pytest.approx(end.finished - arrival, abs=1e-9)
    assert sums(timeline) == end.state_times


@settings(max_examples=40, deadline=None)
@given(configs, requests)
def test_reasons_are_counted_right_while_policies_change(config, plan):
    follow = tuple(replace(config, policy=policy) for policy in sorted(POLICIES))
    world = World(config, enough(plan, 12, 4), 4, max_model_len=40, follow=follow)
    step = world.step

    def checked() -> bool:
        scheduler = world.scheduler
        counted = scheduler.waiting_by_reason()
        handles = scheduler.table.handle[[*scheduler.waiting.rows.tolist(), *scheduler.quotas.rows]].tolist()
        now = [scheduler.timeline(handle, world.clock() + 1.0)[-1].state for handle in handles]
        assert counted == {state: now.count(state) for state in set(now)}
        return step()

    world.step = checked
    world.run(plan)
    for handle, (arrival, *_) in enumerate(plan):
        check_timeline(world.finished[handle], arrival)
    assert not world.scheduler.accounting._marks
    assert not world.scheduler.accounting._joined


# -- bounded memory ---------------------------------------------------------------------------------------------------


def test_a_long_timeline_is_folded_in_its_middle():
    marks: list[Mark] = []
    for i in range(1000):
        note(marks, Mark(float(i), i % 3, i, 2 * i))
    assert len(marks) <= MOST
    timeline = spans(marks, Mark(1000.0, 0, 1000, 2000), "abc")
    assert [span.end for span in timeline[:-1]] == [span.start for span in timeline[1:]]
    assert sums(timeline) == {"a": 334.0, "b": 333.0, "c": 333.0}
    assert sum(span.tokens for span in timeline) == 2000
    assert [span.state for span in timeline].count("several") == 1
    assert timeline[FIRST].state == "several"


def test_a_lane_tells_each_row_the_seconds_since_it_joined():
    """Against one clock for each row, which is what a lane saves."""
    random = np.random.default_rng(0)
    lane, rows, truth = Lane(0), {}, {}
    now, state = 0.0, 0
    for i in range(2000):
        seconds = float(random.integers(1, 9))
        now += seconds
        for times in truth.values():
            times[state] = times.get(state, 0.0) + seconds
        if random.random() < 0.5:
            state = int(random.integers(0, 4))
            lane.waits_for(state, "", now, i)
        if random.random() < 0.1:
            rows[i] = (now, i, lane.turn)
            truth[i] = {}
    for i, joined in rows.items():
        marks: list[Mark] = []
        for mark in lane.marks(joined, 0):
            note(marks, mark)
        timeline = spans(marks, Mark(now, 0, 2000, 0), "0123")
        assert {int(k): t for k, t in sums(timeline).items()} == pytest.approx(truth[i])
        assert len(timeline) <= MOST
