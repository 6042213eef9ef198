"""What stands around another policy hides nothing of it."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core.clusters import Clustered
from headway.core.config import SchedulerConfig
from headway.core.policies import POLICIES, make
from headway.core.policies.aged import Aged
from headway.core.policies.base import Around, Policy
from headway.core.policies.slo import Relegating
from tests.core.memory import World
from tests.core.policies.queue import Queue

AROUND = {"aged": Aged, "relegating": Relegating, "clustered": lambda policy: Clustered(policy, 30.0)}


class Telling(Policy):
    """Notes what it is asked and told."""

    pauses = True

    def __init__(self):
        self.told = []

    def score(self, queue, now):
        return np.zeros(len(queue))


METHODS = {name for name in vars(Policy) if not name.startswith("_") and callable(getattr(Policy, name))} - {"score"}
for _name in METHODS:
    setattr(Telling, _name, lambda self, *args, name=_name: self.told.append(name))


@pytest.mark.parametrize("name", AROUND)
def test_all_that_a_policy_may_be_asked_or_told_reaches_the_one_within(name):
    inner = Telling()
    outer = AROUND[name](inner)
    assert isinstance(outer, Around)
    assert outer.pauses
    queue = Queue(outer)
    handle = queue.add()
    rows = queue.rows([handle])
    outer.served(rows, np.ones(1, np.int32), 1.0)
    outer.rank(rows)
    outer.takes_turns(rows)
    outer.its_turn(1)
    outer.counters()
    outer.ended(rows, 1.0)
    assert set(inner.told) == METHODS


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_relegating_changes_nothing_for_those_who_promise_nothing(policy):
    """Tenants that share, ranks, turns: all as without it."""
    runs = []
    for admission in ("accept", "relegate"):
        config = SchedulerConfig(policy=policy, admission=admission, max_batch_size=2, max_num_batched_tokens=16)
        world = World(config, num_blocks=20, classes=("realtime", "batch"))
        for handle in range(12):
            world.add(handle, prompt_len=5 + handle % 7, max_tokens=6)
        world.drain()
        runs.append([(batch.rows.tolist(), batch.num_tokens.tolist()) for batch in world.executor.batches])
    assert runs[0] == runs[1]


def test_nobody_loses_a_place_in_a_padded_group_that_nobody_may_join():
    world = World(
        SchedulerConfig(
            batching="static", policy="priority", max_batch_size=2, max_num_seqs=2, max_num_batched_tokens=16
        )
    )
    for handle in range(2):
        world.add(handle, prompt_len=4, max_tokens=20, priority=2)
    for _ in range(6):
        world.step()
    world.add(9, prompt_len=4, max_tokens=3, priority=0)
    world.drain()
    assert world.scheduler.counters.num_preemptions == 0
    assert {world.finished[handle].finished for handle in range(2)} == {20.0}


def test_make_finds_what_is_aged():
    assert make("aged:fair").pauses
