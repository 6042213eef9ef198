"""Each order on a handful of requests, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headway.core import policies
from headway.core.load import Load
from headway.core.policies.deadline import LeastLaxity
from headway.core.step_time import StepTimeModel
from tests.core.policies.queue import Queue


def test_fcfs_is_by_arrival_and_ties_by_age():
    queue = Queue(policies.make("fcfs"))
    queue.now = 5.0
    late = queue.add()
    queue.now = 1.0
    first, second = queue.add(), queue.add()
    assert queue.order() == [first, second, late]


def test_priority_is_lower_first():
    queue = Queue(policies.make("priority"))
    handles = [queue.add(priority=priority) for priority in (0, 5, -3, 0)]
    assert queue.order() == [handles[2], handles[0], handles[3], handles[1]]


def test_sjf_counts_the_whole_job_and_srpt_what_remains():
    for name, expected in (("sjf", [1, 2, 0]), ("srpt", [0, 1, 2])):
        queue = Queue(policies.make(name))
        queue.add(prompt_len=100, max_tokens=5)
        queue.add(prompt_len=10, max_tokens=40)
        queue.add(prompt_len=60, max_tokens=20)
        queue.serve(0, 90)  # 10 + 5 remain of 105
        assert queue.order() == expected


def test_uncached_work_is_what_counts():
    for name in ("shortest", "srpt", "default", "lpm"):
        queue = Queue(policies.make(name))
        queue.add(prompt_len=50)
        queue.add(prompt_len=400, cached=384)
        assert queue.order() == [1, 0], name


def test_shortest_does_not_look_at_the_answer():
    queue = Queue(policies.make("shortest"))
    queue.add(prompt_len=20, max_tokens=1)
    queue.add(prompt_len=10, max_tokens=1000)
    assert queue.order() == [1, 0]


def test_hrrn_weighs_waiting_by_work():
    queue = Queue(policies.make("hrrn"))
    long = queue.add(prompt_len=100)
    queue.now = 8.0
    short = queue.add(prompt_len=10)
    queue.now = 8.5  # (8.5 + 100) / 100 against (0.5 + 10) / 10
    assert queue.order() == [long, short]
    queue.now = 10.0  # 0.1 against 0.2
    assert queue.order() == [short, long]


def test_edf_by_deadline_and_those_without_one_by_arrival():
    queue = Queue(policies.make("edf"))
    first = queue.add()
    queue.now = 1.0
    second = queue.add()
    far, near = queue.add(deadline=50.0), queue.add(deadline=2.0)
    assert queue.order() == [near, far, first, second]


def test_least_laxity_subtracts_the_service_to_come():
    queue = Queue(LeastLaxity(rates=(0.01, 0.1)))
    short = queue.add(prompt_len=10, max_tokens=10, deadline=12.0)  # 12 - 0.1 - 1.0 = 10.9
    long = queue.add(prompt_len=100, max_tokens=50, deadline=15.0)  # 15 - 1.0 - 5.0 = 9.0
    none = queue.add(prompt_len=10)
    later = queue.add(prompt_len=1000, max_tokens=500)  # without a deadline it is by arrival
    assert queue.order() == [long, short, none, later]
    np.testing.assert_allclose(queue.policy.score(queue.rows([short, long]), 0.0), [10.9, 9.0])


def test_least_laxity_learns_the_rates_from_the_engine():
    model = StepTimeModel()
    while not model.fitted:
        for tokens in (1, 8, 32, 512):
            model.observe(Load(tokens, 0.0, 1, tokens), 0.002 * tokens)
    policy = policies.make("least-laxity", model)
    queue = Queue(policy)
    queue.add(prompt_len=100, max_tokens=1, deadline=10.0)
    queue.add(prompt_len=200, max_tokens=1, deadline=10.0)
    scores = policy.score(queue.rows(), 0.0)
    assert scores[0] - scores[1] == pytest.approx(100 * 0.002, rel=0.05)


def test_lpm_prefers_the_longest_hit():
    queue = Queue(policies.make("lpm"))
    handles = [queue.add(prompt_len=100, cached=cached) for cached in (0, 64, 16)]
    assert queue.order() == [handles[1], handles[2], handles[0]]


class TestMlfq:
    def queue(self) -> Queue:
        return Queue(policies.POLICIES["mlfq"](quantum=10, promote=5.0))

    def levels(self, queue: Queue) -> list[float]:
        return queue.policy.level(queue.rows(), queue.now).tolist()

    def test_joins_at_the_level_that_holds_the_prompt(self):
        queue = self.queue()
        for prompt_len in (1, 10, 11, 20, 21, 40, 41, 81):
            queue.add(prompt_len=prompt_len)
        assert self.levels(queue) == [0, 0, 1, 1, 2, 2, 3, 4]

    def test_falls_when_a_quantum_is_used_up(self):
        queue = self.queue()
        short, long = queue.add(prompt_len=10), queue.add(prompt_len=35)
        seen = []
        for _ in range(7):
            queue.serve(short, 10)
            seen.append(self.levels(queue)[0])
        assert seen == [1, 1, 2, 2, 2, 2, 3]  # quanta of 10, 20, 40 end at 10, 30, 70
        for tokens, level in ((39, 2), (1, 3), (79, 3), (1, 4)):  # 40, then 80
            queue.serve(long, tokens)
            assert self.levels(queue)[1] == level

    def test_who_starves_goes_to_the_top_for_one_quantum(self):
        queue = self.queue()
        starved = queue.add(prompt_len=100)
        queue.now = 5.1
        fresh = queue.add(prompt_len=5)
        assert queue.order() == [starved, fresh]
        queue.serve(starved, 4)
        queue.now = 5.2
        assert self.levels(queue) == [0, 0]
        queue.serve(starved, 6)
        assert self.levels(queue) == [4, 0]

    def test_a_reused_row_begins_anew(self):
        queue = self.queue()
        queue.serve(queue.add(prompt_len=10), 70)
        queue.end(0)
        queue.now = 100.0
        queue.add(prompt_len=10)
        assert self.levels(queue) == [0]
