"""Fair sharing where rows and tokens are short: who pauses, for whom, and what cached prefixes may change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.core.config import SchedulerConfig
from headway.core.fairness import TenantService, jain
from headway.core.policies.fair import Fair
from headway.core.table import Phase
from headway.core.tenants import Tenant
from tests.core.memory import World
from tests.core.policies.queue import Queue

CONFIG = SchedulerConfig(
    policy="fair", batching="continuous", max_batch_size=4, max_num_batched_tokens=16, depth=1, prefix_caching=False
)


def flooded(**changes) -> World:
    world = World(replace(CONFIG, **changes), num_blocks=400, max_model_len=64)
    for handle in range(12):
        world.add(handle, prompt_len=4, max_tokens=40, tenant="flood")
    for _ in range(8):
        world.step()
    assert len(world.scheduler.running) == 4
    return world


def test_one_of_the_flood_pauses_for_whom_has_had_nothing():
    """Every row decodes for the flood, and has long to go: the quiet one's answer begins with the next step."""
    world = flooded()
    world.add(12, prompt_len=4, max_tokens=3, tenant="quiet")
    world.step()
    assert len(world.tokens[12]) == 1
    assert len(world.executor.batches[-1].rows) <= 4
    world.drain()
    assert all(len(world.tokens[handle]) == 40 for handle in range(12))
    assert world.finished[12].state_times == pytest.approx({"prefill": 1.0, "decode": 2.0})


def test_first_come_first_served_lets_it_wait():
    world = flooded(policy="fcfs")
    world.add(12, prompt_len=4, max_tokens=3, tenant="quiet")
    world.step()
    assert not world.tokens[12]


def test_the_floods_prompts_do_not_lengthen_its_step():
    """The quiet one's prompt needs three tokens of a step's sixteen: what is left goes to decodes only."""
    world = World(replace(CONFIG, max_batch_size=8), num_blocks=400, max_model_len=64)
    for handle in range(8):
        world.add(handle, prompt_len=4, max_tokens=40, tenant="flood")
    while world.scheduler.strategies.policy.counters()[world.scheduler.table.code("flood")] < 300:
        world.step()
    for handle in range(8, 11):
        world.add(handle, prompt_len=30, max_tokens=2, tenant="flood")
    world.add(11, prompt_len=3, max_tokens=2, tenant="quiet")
    world.step()
    assert len(world.tokens[11]) == 1
    batch = world.executor.batches[-1]
    assert sorted(batch.num_tokens.tolist())[-2:] == [1, 3]


def test_service_follows_the_weights_step_by_step():
    """Two backlogs of prompts and answers of all lengths, weights 3 : 1: the counters never part by more than a step's
    tokens and what decodes take."""
    config = replace(CONFIG, tenants={"gold": Tenant(weight=3.0)}, max_num_partial_prefills=1)
    world = World(config, num_blocks=4000, max_model_len=64)
    draw = np.random.default_rng(0)
    for handle in range(120):
        world.add(handle, int(draw.integers(1, 40)), int(draw.integers(1, 20)), tenant="gold" if handle % 4 else "tin")
    scheduler, apart = world.scheduler, []
    while len(scheduler.waiting) > 20:
        world.step()
        service = scheduler.service.totals()
        gold, tin = (service[scheduler.table.code(name)] for name in ("gold", "tin"))
        apart.append(gold / 3 - tin)
    assert max(map(abs, apart)) <= 40
    assert abs(apart[-1]) < 0.05 * (gold / 3)
    world.drain()


def test_of_a_tenants_own_the_longest_cached_prefix_goes_first_within_a_bound():
    queue = Queue(Fair(within=25.0, between=0.0))
    first = queue.add(prompt_len=10, max_tokens=10, tenant="a")
    near = queue.add(prompt_len=100, max_tokens=10, tenant="a", cached=96)
    far = queue.add(prompt_len=100, max_tokens=10, tenant="a", cached=98)
    assert queue.order() == [near, first, far]


def test_a_longer_cached_prefix_does_not_bring_another_tenants_turn_forward():
    queue = Queue(Fair(between=5.0))
    a = [queue.add(tenant="a", cached=cached) for cached in (0, 8)]
    b = [queue.add(tenant="b", cached=cached) for cached in (0, 9)]
    assert set(queue.order()[:2]) == {a[1], b[1]}  # within each tenant the cached one first
    queue.serve(b[0], 6)  # more than 5 ahead: what is cached of b's matters no more
    assert queue.order()[0] == a[1]
    assert queue.order().index(b[1]) > 0


def test_on_board_nothing_is_reordered_by_what_is_cached():
    queue = Queue(Fair())
    first, second = queue.add(tenant="a"), queue.add(tenant="a", cached=8)
    queue.table.phase[:] = np.where(queue.table.phase == Phase.WAITING, Phase.RUNNING, queue.table.phase)
    assert queue.order() == [first, second]


def test_jains_index_by_hand():
    assert jain([5.0, 5.0, 5.0]) == 1.0
    assert jain([7.0, 0.0]) == 0.5
    assert jain([3.0, 1.0]) == 0.8
    assert np.isnan(jain([0.0, 0.0]))


def test_the_index_is_of_those_who_wanted_more_all_the_time():
    queue = Queue(Fair())
    service = TenantService(queue.table)
    handles = {name: queue.add(prompt_len=1000, tenant=name) for name in "abc"}
    rows = {name: queue.table.row_of(handle) for name, handle in handles.items()}
    everybody = np.array(list(rows.values()))
    service.sample(everybody, 0.0)
    assert np.isnan(service.index({}, 0.0))
    queue.serve(handles["a"], 300)
    queue.serve(handles["b"], 100)
    service.sample(everybody, 10.0)
    assert service.index({}, 10.0) == pytest.approx(400**2 / (3 * (300**2 + 100**2)))
    service.sample(everybody[:2], 20.0)  # c does not wait any more
    assert service.index({}, 20.0) == pytest.approx(0.8)
    assert service.index({"a": 3.0}, 20.0) == pytest.approx(1.0)
    assert np.isnan(service.index({}, 60.0)), "nothing is known of the last 30 s"
    queue.table.phase[rows["a"]] = Phase.ENDED
    service.ended(rows["a"])
    assert service.of({"a": 1, "b": 1, "nobody": 1}) == {"a": 300, "b": 100, "nobody": 0}
