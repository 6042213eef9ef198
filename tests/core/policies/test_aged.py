"""Bounded overtaking: what a policy claims holds against a count of its own, whatever comes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import policies
from headway.core.config import SchedulerConfig
from headway.core.policies.aged import Aged
from headway.core.policies.shortest import Shortest
from headway.core.table import Phase
from tests.core.memory import World
from tests.core.policies.queue import Queue

BOUND = 40
CLAIMING = [name for name, policy in policies.POLICIES.items() if policy.bounded]
AGED = [f"aged:{name}" for name in policies.POLICIES if name not in CLAIMING]

arrivals = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(-1, 1)), min_size=1, max_size=40)


def overtaken(queue: Queue, plan: list[tuple[int, int, int]], rows: int, budget: int) -> int:
    """Serves who comes first, so many rows and tokens a step. Returns the most tokens of later arrivals that anybody
    had seen served when a later one was served once more."""
    table = queue.table
    work: dict[int, int] = {}
    most = 0
    pending = list(plan)
    while pending or len(table):
        if pending and (not len(table) or pending[0][0] == 0):
            _, prompt_len, priority = pending.pop(0)
            queue.add(prompt_len, priority=priority, tenant="ab"[priority == 0], deadline=2.0 + prompt_len)
            continue
        if pending:
            pending[0] = (pending[0][0] - 1, *pending[0][1:])
        queue.now += 1.0
        table.step += 1
        left = budget
        for handle in queue.order()[:rows]:
            row = table.row_of(handle)
            tokens = min(left, int(table.target[row] - table.computed[row]))
            left -= tokens
            if tokens:
                seen = {
                    older: sum(t for h, t in work.items() if h > older) for older in table._row_of if older < handle
                }
                most = max(most, *seen.values(), 0)
                queue.serve(handle, tokens)
                work[handle] = work.get(handle, 0) + tokens
            if table.computed[row] == table.target[row]:
                queue.end(handle)
    return most


@pytest.mark.parametrize("name", CLAIMING + AGED)
@settings(max_examples=25, deadline=None)
@given(plan=arrivals, rows=st.integers(1, 3), budget=st.integers(1, 8))
def test_later_work_ahead_of_anyone_stays_within_the_claim(name, plan, rows, budget):
    policy = policies.make(name, overtaking=BOUND)
    assert policy.bounded
    most = overtaken(Queue(policy), plan, rows, budget)
    assert most <= policy.overtaking + rows * budget


@given(plan=arrivals, overtaking=st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_those_due_are_exactly_those_overtaken_by_so_much(plan, overtaking):
    """One number stands for a sum per request."""
    queue = Queue(Aged(Shortest(), overtaking))
    work: dict[int, int] = {}
    for served, tokens, _ in plan:
        queue.add()
        handle = max(0, queue.table._seq - 1 - served)
        queue.serve(handle, min(tokens, 5))
        work[handle] = work.get(handle, 0) + min(tokens, 5)
        rows = queue.rows()
        late = queue.policy.score(rows, 0.0) < -1e280
        expected = [sum(t for h, t in work.items() if h > handle) >= overtaking for handle in rows.handle.tolist()]
        assert late.tolist() == expected


def test_a_giant_goes_first_once_it_was_overtaken_enough():
    queue = Queue(policies.make("default", overtaking=30))
    giant = queue.add(prompt_len=1000)
    for _ in range(2):
        short = queue.add(prompt_len=15)
        assert queue.order() == [short, giant]
        queue.serve(short, 15)
        queue.end(short)
    assert queue.order() == [giant]
    short = queue.add(prompt_len=15)
    assert queue.order() == [giant, short]


def test_those_due_go_in_order_of_arrival():
    queue = Queue(policies.make("aged:shortest", overtaking=5))
    handles = [queue.add(prompt_len=length) for length in (300, 200, 100, 10)]
    queue.serve(handles[-1], 6)
    assert queue.order() == handles
    assert queue.order()[:2] == [handles[0], handles[1]]


def test_the_bound_must_be_a_token_at_least():
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        Aged(Shortest(), 0)


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous", "inflight"])
@pytest.mark.parametrize("name", [*policies.POLICIES, "aged:mlfq"])
def test_every_order_in_every_formation_loses_nothing(name, batching):
    """So few blocks that rows are preempted, aborts among it; every KV cell is checked."""
    draw = np.random.default_rng(3)
    config = SchedulerConfig(
        policy=name, batching=batching, max_batch_size=4, max_num_batched_tokens=12, max_wait=2.0, max_overtaking=50
    )
    world = World(config, num_blocks=20, block_size=4, max_model_len=48)
    plan = [
        (float(at), int(draw.integers(1, 30)), int(draw.integers(1, 16)), 10**6, 9.0 if at % 11 == 5 else None)
        for at in range(30)
    ]
    world.run(plan)
    assert set(world.finished) == set(range(len(plan)))
    for handle, (_, _, max_tokens, _, abort_after) in enumerate(plan):
        if abort_after is None:
            assert len(world.tokens[handle]) == max_tokens
    assert not np.count_nonzero(world.scheduler.table.phase != Phase.FREE)
