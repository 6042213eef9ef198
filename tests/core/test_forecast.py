"""What is predicted on arrival, against what then happens; who is refused or relegated, and what that leaves behind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headway.core.config import SchedulerConfig
from headway.core.event_log import replay
from headway.core.forecast import SAMPLE, Forecaster
from headway.core.policies import POLICIES, Fcfs, make
from headway.core.request import Request, RequestError, SamplingParams, Slo, Unattainable
from headway.core.scheduler import Scheduler
from headway.core.step_time import StepTimeModel
from headway.core.strategies import Strategies
from headway.core.table import Rows
from headway.lab import paced
from headway.lab.paced import StepTimes
from headway.lab.traffic import Arrival, poisson
from tests.core.memory import World

STEP = StepTimes(base=0.02, per_token=0.001, per_row=0.001)
SOON, ANY_TIME = Slo(ttft=1e-3), Slo()


def config(admission: str = "refuse", policy: str = "fcfs", **others: object) -> SchedulerConfig:
    facts = {"max_batch_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32, "prefix_caching": False} | others
    return SchedulerConfig(batching="continuous", policy=policy, admission=admission, **facts)


def asked(requests, **facts):
    """Every forecast, and what became of it."""
    predicted = {}

    def build(*args):
        scheduler = Scheduler.of(*args)

        def judge(row, request, now):
            """Predicts for everybody, and lets everybody in."""
            forecast = scheduler.forecaster.of(row, now)
            if forecast is not None:
                predicted[request.handle] = forecast
            scheduler.forecaster.accepted(row)

        scheduler._intake._judge = judge
        return scheduler

    run = paced.run(config(**facts), requests, step_times=STEP, build=build)
    return [(forecast, run.served[handle]) for handle, forecast in predicted.items()]


def known(count: int, at: float = 0.0) -> list[Arrival]:
    """Requests whose length the scheduler knows, since they ignore EOS."""
    return [Arrival(at, 8 + 3 * (i % 5), 10 + 7 * (i % 4)) for i in range(count)]


def test_the_wait_in_a_queue_is_predicted():
    """A warm-up, then 100 at once, first come first served: each one's wait is foreseen, though all else is ahead."""
    seen = asked([*known(40), *known(100, at=60.0)], policy="fcfs")
    ratios = [forecast.wait / one.ttft for forecast, one in seen if one.arrival == 60.0 and one.ttft > 1.0]
    assert len(ratios) > 80
    assert np.percentile(ratios, 5) > 0.75
    assert np.percentile(ratios, 95) < 1.3


def test_the_end_is_predicted():
    seen = asked([*known(40), *known(100, at=60.0)], policy="fcfs")
    ratios = [forecast.end / one.e2e for forecast, one in seen if one.arrival == 60.0 and one.ttft > 1.0]
    assert 0.75 < np.median(ratios) < 1.3


def test_on_an_idle_device_there_is_nothing_to_wait_for():
    seen = asked([*known(40), *[Arrival(60.0 + 10 * i, 16, 10) for i in range(5)]])
    alone = [(forecast, one) for forecast, one in seen if one.arrival >= 60.0]
    assert len(alone) == 5
    for forecast, one in alone:
        assert forecast.queue == 0.0
        assert forecast.wait < 3 * one.ttft


@pytest.mark.parametrize("policy", ["default", "slo"])
def test_a_short_one_that_goes_first_is_not_told_the_wait_of_all(policy):
    giants = [Arrival(60.0, 400, 40) for _ in range(30)]
    seen = asked([*known(40), *giants, Arrival(61.0, 4, 4)], policy=policy)
    forecast, one = seen[-1]
    assert one.request.prompt_len == 4
    assert forecast.wait < 5.0 < seen[-2][0].wait


def world(**facts: object) -> World:
    """A device that is known, all of whose rows are taken for long."""
    world = World(config(**facts), num_blocks=4000, max_model_len=400)
    for handle in range(24):
        world.add(handle, prompt_len=6, max_tokens=8, natural=5)
    world.drain()
    for handle in range(100, 104):
        world.add(handle, prompt_len=6, max_tokens=300)
    for _ in range(4):
        world.step()
    return world


def new(handle: int, slo: Slo, now: float) -> Request:
    return Request(f"r{handle}", handle, [5] * 8, SamplingParams(max_tokens=4), now, (7,), slo=slo)


def test_nobody_is_refused_before_the_device_is_known():
    world = World(config())
    world.scheduler.add(new(1, SOON, 0.0), 0.0)
    assert len(world.scheduler.waiting) == 1


def test_nobody_is_refused_for_the_length_of_an_answer_that_nobody_knows():
    """The device is known, but no answer has ended by itself yet: 300 tokens are what max_tokens allows, no more."""
    busy = World(config(), num_blocks=4000, max_model_len=400)
    for handle in range(24):
        busy.add(handle, prompt_len=6, max_tokens=8)
    busy.drain()
    request = Request("a", 200, [5] * 8, SamplingParams(max_tokens=300), busy.clock(), (7,), slo=Slo(deadline=50.0))
    busy.scheduler.add(request, busy.clock())
    assert len(busy.scheduler.waiting) == 1


def test_a_high_one_does_not_wait_for_those_that_pause_for_it():
    busy = world(policy="priority")
    now, promise = busy.clock(), Slo(ttft=1.5)  # steps take 1 s
    high = Request("a", 200, [5] * 8, SamplingParams(max_tokens=4), now, (7,), priority=-1, slo=promise)
    low = Request("b", 201, [5] * 8, SamplingParams(max_tokens=4), now, (7,), priority=9, slo=promise)
    busy.scheduler.add(high, now)
    with pytest.raises(Unattainable):
        busy.scheduler.add(low, now)


def test_who_promises_nothing_is_never_refused():
    busy = world()
    for handle in range(200, 260):
        busy.scheduler.add(new(handle, ANY_TIME, busy.clock()), busy.clock())
    assert len(busy.scheduler.waiting) == 60


@pytest.mark.parametrize("policy", POLICIES)
def test_who_is_refused_leaves_nothing_behind(policy):
    busy = world(policy=policy)
    scheduler, now = busy.scheduler, busy.clock()
    before = len(scheduler.table), scheduler.pool.available, scheduler.board.num_free
    for handle in range(200, 230):
        with pytest.raises(Unattainable) as refusal:
            scheduler.add(new(handle, SOON, now), now)
        assert refusal.value.code == "slo_unattainable"
        assert refusal.value.retry_after > 0
        assert f"{refusal.value.retry_after:.1f} s" in refusal.value.message
    scheduler.check()
    assert (len(scheduler.table), scheduler.pool.available, scheduler.board.num_free) == before
    busy.drain()
    assert len(busy.finished) == 28


@pytest.mark.parametrize(
    "slo",
    [Slo(ttft=1e-3), Slo(deadline=2.0), Slo(max_queue=1e-3), Slo(tpot=1e-3)],
    ids=["ttft", "end", "queue", "tpot"],
)
def test_each_promise_counts(slo):
    busy = world()
    with pytest.raises(Unattainable):
        busy.scheduler.add(new(200, slo, busy.clock()), busy.clock())


def test_a_promise_that_can_be_kept_is_accepted():
    busy = world()
    busy.scheduler.add(new(200, Slo(ttft=1e4, tpot=1e3, deadline=1e5), busy.clock()), busy.clock())
    assert len(busy.scheduler.waiting) == 1


@pytest.mark.parametrize("policy", ["fcfs", "slo", "aged:edf"])
def test_who_is_relegated_goes_last_and_is_served_all_the_same(policy):
    busy = world(admission="relegate", policy=policy)
    for handle, slo in ((200, SOON), (201, ANY_TIME), (202, Slo(ttft=1e4))):
        busy.tokens[handle], busy.natural[handle] = [], 10**6
        busy.scheduler.add(new(handle, slo, busy.clock()), busy.clock())
    busy.drain()
    first = {handle: busy.finished[handle].first_token for handle in (200, 201, 202)}
    assert first[200] >= max(first[201], first[202])
    assert busy.finished[200].output_len == 4


def test_a_log_with_refusals_replays_to_the_same_batches():
    events, made = [], []

    def build(*args):
        made.append(Scheduler.of(*args))
        made[0].log = events.append
        return made[0]

    requests = [
        Arrival(0.0, 20, 12, 40, slo=Slo(ttft=0.6, deadline=4.0) if i % 2 else Slo(ttft=2.0)) for i in range(300)
    ]
    settings = config(policy="slo")
    run = paced.run(settings, poisson(requests, 8.0, 0), step_times=STEP, build=build)
    refused = [one for one in run.served if not math.isnan(one.refused)]
    assert 10 < len(refused) < 280
    assert all(not one.kept and one.output_len == 0 for one in refused)
    fresh = Scheduler.of(settings, paced.AMPLE.num_blocks, paced.AMPLE.block_size, paced.AMPLE.max_model_len)
    again: list = []
    fresh.log = again.append
    assert len(replay(events, fresh)) == run.stats.num_steps
    assert [event[:2] for event in again] == [event[:2] for event in events]


class Counting(Fcfs):
    """How many rows each call scores."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def score(self, queue, now):
        self.calls.append(len(queue))
        return super().score(queue, now)


def test_a_long_queue_is_sampled():
    """However many wait, an arrival looks at a bounded number; of a uniform queue the sample says the same."""
    waits = []
    for count in (1_000, 20_000):
        policy = Counting()
        scheduler = Scheduler.of(config(), 4000, 16, 400, own=policy)
        for _ in range(40):
            scheduler.step_time.observe(_load(), 0.05)
        scheduler.table.lengths_known = True
        for handle in range(count):
            scheduler.add(new(handle, ANY_TIME, 0.0), 0.0)
        policy.calls.clear()
        scheduler.add(new(count, Slo(ttft=1e6, deadline=1e6), 0.0), 0.0)
        assert max(policy.calls) <= SAMPLE + 1
        waits.append(_wait(scheduler.forecaster, scheduler, count))
    assert waits[1] / waits[0] == pytest.approx(20, rel=0.05)


def _load():
    from headway.core.load import Load

    return Load(4.0, 0.0, 4.0, 80.0)


def _wait(forecaster: Forecaster, scheduler: Scheduler, handle: int) -> float:
    row = scheduler.table.row_of(handle)
    forecast = forecaster.of(row, 0.0)
    assert forecast is not None
    assert forecast.keeps(Rows(scheduler.table, np.array([row]), 0.0)) is True
    return forecast.wait


def test_an_unknown_admission_is_refused_by_name():
    with pytest.raises(ValueError, match="accept, relegate, refuse"):
        SchedulerConfig(admission="maybe")


def test_errors_of_the_request_itself_stay_what_they_are():
    with pytest.raises(RequestError, match="empty"):
        Scheduler.of(config(), 100, 16, 400).add(Request("a", 1, [], SamplingParams(max_tokens=4), 0.0, slo=SOON), 0.0)


def test_no_order_that_gives_somebody_up_claims_a_bound():
    assert not make("slo").bounded
    assert not Strategies.of(config("relegate", "default"), StepTimeModel()).policy.bounded
