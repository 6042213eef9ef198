"""Tenants' limits: who waits outside, for how long, and that nobody is forgotten there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.config import SchedulerConfig
from headway.core.tenants import Tenant
from tests.core.memory import World

ONE_AT_A_TIME = SchedulerConfig(
    max_batch_size=4, max_num_batched_tokens=64, depth=1, tenants={"a": Tenant(max_in_flight=1)}
)


def test_the_limit_makes_a_tenant_wait_and_nobody_else():
    """Two of `a`, one of `b`, room for all: the second of `a` waits until the first has ended, and for nothing else."""
    world = World(ONE_AT_A_TIME, max_model_len=64)
    for handle, tenant in enumerate("aab"):
        world.add(handle, prompt_len=4, max_tokens=5, tenant=tenant)
    assert world.scheduler.num_waiting == 3
    assert world.scheduler.waiting_by_reason() == {"wait_step": 2, "wait_quota": 1}
    world.drain()
    assert world.finished[0].state_times == pytest.approx({"prefill": 1.0, "decode": 4.0})
    assert world.finished[1].state_times == pytest.approx({"wait_quota": 5.0, "prefill": 1.0, "decode": 4.0})
    assert world.finished[2].state_times == pytest.approx({"prefill": 1.0, "decode": 4.0})


def test_those_held_come_first_come_first_served_whatever_the_policy():
    world = World(replace(ONE_AT_A_TIME, policy="shortest"), max_model_len=64)
    for handle, length in enumerate([9, 8, 4, 2]):
        world.add(handle, prompt_len=length, max_tokens=3, tenant="a")
    world.drain()
    assert list(world.finished) == [0, 1, 2, 3]


def test_one_that_is_held_can_be_aborted_and_takes_nobodys_place():
    world = World(ONE_AT_A_TIME, max_model_len=64)
    for handle in range(3):
        world.add(handle, prompt_len=4, max_tokens=3, tenant="a")
    world.abort(1)
    world.scheduler.check()
    assert world.finished[1].state_times == {}
    world.step()
    world.abort(0)
    world.drain()
    assert len(world.tokens[2]) == 3
    assert world.tokens[1] == []


def test_a_higher_limit_lets_those_in_who_wait_for_it():
    world = World(ONE_AT_A_TIME, max_model_len=64)
    for handle in range(5):
        world.add(handle, prompt_len=4, max_tokens=3, tenant="a")
    world.scheduler.follow(replace(ONE_AT_A_TIME, tenants={"a": Tenant(max_in_flight=3)}), world.clock())
    assert world.scheduler.waiting_by_reason() == {"wait_step": 3, "wait_quota": 2}
    world.scheduler.follow(replace(ONE_AT_A_TIME, tenants={}), world.clock())
    assert world.scheduler.waiting_by_reason() == {"wait_step": 5}
    world.scheduler.follow(ONE_AT_A_TIME, world.clock())  # a lower one sends nobody away
    world.add(5, prompt_len=4, max_tokens=3, tenant="a")
    assert world.scheduler.waiting_by_reason() == {"wait_step": 5, "wait_quota": 1}
    world.drain()
    assert len(world.finished) == 6


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(["static", "dynamic", "continuous", "inflight"]),
    st.sampled_from(["fcfs", "fair", "default"]),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20), st.integers(1, 9)), min_size=1, max_size=20),
    st.integers(1, 3),
)
def test_no_more_than_the_limit_are_ever_in_flight(batching, policy, plan, limit):
    config = replace(ONE_AT_A_TIME, batching=batching, policy=policy, depth=2)
    world = World(replace(config, tenants={"a": Tenant(max_in_flight=limit)}), max_model_len=64)
    scheduler, plan = world.scheduler, sorted(plan, key=lambda one: one[1])
    for handle, (tenant, at, tokens) in enumerate(plan):
        while world.clock() < at:
            if not world.step():
                world.clock.advance_to(min(at, world.loop.wait_until))
        world.add(handle, prompt_len=3, max_tokens=tokens, arrival=world.clock(), tenant=tenant)
        outside = set(scheduler.quotas.rows)
        inside = [row for row, request in enumerate(scheduler.table.requests) if request and request.tenant == "a"]
        assert sum(scheduler.table.live(row) and row not in outside for row in inside) <= limit
    world.drain()
    assert sorted(world.finished) == list(range(len(plan)))


@pytest.mark.parametrize(("terms", "named"), [({"weight": 0.0}, "weight"), ({"max_in_flight": 0}, "max_in_flight")])
def test_what_a_tenant_cannot_be(terms, named):
    with pytest.raises(ValueError, match=named):
        Tenant(**terms)
