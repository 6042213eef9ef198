"""Paced runs against closed forms: what a queue, a chunked prompt, a padded group must take at known speed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headway.core.config import SchedulerConfig
from headway.core.request import FinishReason
from headway.core.scheduler import Scheduler
from headway.lab import paced, traffic
from headway.lab.paced import StepTimes
from headway.lab.traffic import Arrival

STEP = 0.01
CONSTANT = StepTimes(base=STEP)


def config(**settings) -> SchedulerConfig:
    return SchedulerConfig(**{"batching": "continuous", "policy": "fcfs", "depth": 1, "max_batch_size": 8} | settings)


def test_one_request_alone_takes_a_step_a_token():
    run = paced.run(config(), [Arrival(1.0, 10, 5)], step_times=CONSTANT)
    (one,) = run.served
    assert one.arrival == 1.0
    assert one.ttft == pytest.approx(STEP)
    assert one.e2e == pytest.approx(5 * STEP)
    assert one.tpot == pytest.approx(STEP)
    assert run.itl == pytest.approx([STEP] * 4)


def test_a_prompt_in_chunks_takes_a_step_a_chunk():
    run = paced.run(config(max_num_batched_tokens=128), [Arrival(0.0, 300, 2)], step_times=CONSTANT)
    assert run.served[0].ttft == pytest.approx(3 * STEP)


def test_step_times_by_their_features():
    times = StepTimes(base=1.0, per_token=0.1, per_attended=1e-3, per_row=0.01, per_kv_token=1e-4, per_token_over=0.5)
    run = paced.run(config(), [Arrival(0.0, 10, 2)], step_times=times)
    prompt = 1.0 + 0.1 * 10 + 1e-3 * 9 * 10 + 0.01 + 1e-4 * 10 + 0.5 * 9
    decode = 1.0 + 0.1 + 0.01 + 1e-4 * 11
    assert run.served[0].ttft == pytest.approx(prompt)
    assert run.served[0].e2e == pytest.approx(prompt + decode)
    assert run.stats.device_time == pytest.approx(prompt + decode)


def test_learnt_step_times_keep_the_total_and_the_slow_steps():
    """A device that now and then takes far longer: of its typical times alone neither would come out."""
    random = np.random.default_rng(3)
    lived: list[float] = []

    def device(batch) -> float:
        slow = 5.0 if random.random() < 0.04 else random.uniform(0.9, 1.3)
        lived.append((0.01 + 0.001 * batch.load.tokens) * slow)
        return lived[-1]

    learnt: list[StepTimes] = []
    replayed: list[float] = []

    def times(batch) -> float:
        replayed.append(learnt[0](batch))
        return replayed[-1]

    def build(*args, **kwargs):
        schedulers.append(Scheduler.of(*args, **kwargs))
        return schedulers[-1]

    schedulers: list[Scheduler] = []
    requests = [Arrival(0.0, 40 + i % 9, 20 + i % 11) for i in range(300)]
    real = paced.run(config(), requests, step_times=device, build=build, users=16)
    learnt.append(StepTimes.of(schedulers[0].step_time))
    twin = paced.run(config(), requests, step_times=times, users=16)
    assert sum(replayed) == pytest.approx(sum(lived), rel=0.1)
    assert twin.percentile("itl", 99) == pytest.approx(real.percentile("itl", 99), rel=0.15)
    assert twin.percentile("itl", 50) == pytest.approx(real.percentile("itl", 50), rel=0.1)


@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous", "inflight"])
def test_nothing_is_lost(batching):
    requests = traffic.poisson(traffic.chat_and_documents(200, seed=3, scale=0.3), rate=8.0, seed=3)
    run = paced.run(config(batching=batching, depth=2, max_num_batched_tokens=64), requests)
    assert [one.request for one in run.served] == requests
    assert [one.output_len for one in run.served] == [request.output_len for request in requests]
    assert len(run.itl) == sum(request.output_len - 1 for request in requests)
    assert np.bincount(run.itl_of, minlength=200).tolist() == [request.output_len - 1 for request in requests]
    for one in run.served:
        assert one.arrival == pytest.approx(one.request.at)
        assert sum(one.state_times.values()) == pytest.approx(one.e2e)
        assert one.arrival <= one.first_token <= one.finished
    assert run.of_class("realtime").output_tokens + run.of_class("batch").output_tokens == run.output_tokens
    assert 0 < run.utilisation <= run.busy <= 1


def test_known_lengths_cost_exactly_their_tokens():
    requests = [Arrival(0.1 * i, 20 + i, 5 + i % 7) for i in range(50)]
    run = paced.run(config(), requests, step_times=CONSTANT)
    assert run.stats.num_batched_tokens == sum(request.prompt_len + request.output_len - 1 for request in requests)
    assert run.padding_waste == 0


def test_requests_end_by_themselves_or_by_their_limit():
    requests = [Arrival(0.0, 4, 3, max_tokens=9), Arrival(0.0, 4, 12, max_tokens=9), Arrival(0.0, 4, 3)]
    run = paced.run(config(), requests, step_times=CONSTANT)
    assert [one.output_len for one in run.served] == [3, 9, 3]
    reasons = [one.reason for one in run.served]
    assert reasons == [FinishReason.STOP, FinishReason.LENGTH, FinishReason.LENGTH]


def test_static_groups_wait_for_their_longest():
    requests = [Arrival(0.0, 10, length) for length in (2, 10, 4, 4, 3, 3, 3, 6)]
    run = paced.run(config(batching="static", max_batch_size=4), requests, step_times=CONSTANT)
    assert [one.ttft for one in run.served] == pytest.approx([STEP] * 4 + [11 * STEP] * 4)
    assert run.duration == pytest.approx(16 * STEP)


def test_an_unfull_static_group_leaves_after_its_timeout():
    requests = [Arrival(0.0, 10, 1), Arrival(0.5, 10, 1), Arrival(5.0, 10, 1)]
    run = paced.run(config(batching="static", static_timeout=2.0), requests, step_times=CONSTANT)
    assert [one.first_token for one in run.served] == pytest.approx([2.0 + STEP, 2.0 + STEP, 5.0 + STEP])


@pytest.mark.parametrize(("settings", "steps"), [
    ({"batching": "inflight", "depth": 2}, 1.5),
    ({"batching": "continuous", "depth": 1}, 1.5),
    ({"batching": "continuous", "depth": 2}, 2.5),
])  # fmt: skip
def test_who_comes_at_half_of_a_step_boards_the_next(settings, steps):
    probes = [Arrival((50.5 + 9 * i) * STEP, 1, 1) for i in range(10)]
    run = paced.run(config(**settings), [Arrival(0.0, 1, 200), *probes], step_times=CONSTANT)
    assert [one.ttft / STEP for one in run.served[1:]] == pytest.approx([steps] * 10)


@pytest.mark.parametrize("load", [0.5, 0.95])
def test_one_server_waits_as_queueing_theory_says(load):
    """Lindley's recursion: who comes `gap` after another that waited w waits max(0, w + service - gap)."""
    requests = traffic.poisson([Arrival(0.0, 1, 1)] * 500, load / STEP, seed=1)
    run = paced.run(config(max_batch_size=1), requests, step_times=CONSTANT)
    waits = [0.0]
    for before, after in itertools.pairwise(requests):
        waits.append(max(0.0, waits[-1] + STEP - (after.at - before.at)))
    assert [one.ttft - STEP for one in run.served] == pytest.approx(waits, abs=1e-9)
    assert run.busy == pytest.approx(500 * STEP / run.duration)


def test_capacity_of_full_rows():
    requests = [Arrival(0.0, 1, 10)] * 400
    rate = paced.request_rate(config(max_num_batched_tokens=64), requests, step_times=CONSTANT)
    assert rate == pytest.approx(8 / (10 * STEP), rel=0.03)


def test_a_closed_loop_keeps_its_users_busy():
    run = paced.run(config(), [Arrival(0.0, 5, 2 + i % 5) for i in range(60)], step_times=CONSTANT, users=4)
    events = sorted([(one.arrival, 1) for one in run.served] + [(one.finished, -1) for one in run.served])
    at_once = np.cumsum([change for _, change in events])
    assert at_once.max() == 4
    ends = {one.finished for one in run.served}
    assert all(one.arrival in ends for one in run.served[4:])


def test_a_policy_of_ones_own_decides_the_order():
    requests = [Arrival(0.0, 1, 5, priority=9 - i) for i in range(10)]
    run = paced.run(config(policy="priority", max_batch_size=1), requests, step_times=CONSTANT)
    firsts = [one.first_token for one in run.served]
    assert firsts == sorted(firsts, reverse=True)


def test_poisson_and_bursty_arrivals():
    requests = [Arrival(0.0, 1, 1)] * 20_000
    for timed in (traffic.poisson(requests, 50.0, seed=2), traffic.bursty(requests, 50.0, seed=2, burst=8)):
        assert timed[-1].at == pytest.approx(400, rel=0.05)
        assert all(a.at <= b.at for a, b in itertools.pairwise(timed))
    gaps = np.diff([one.at for one in traffic.poisson(requests, 50.0, seed=2)])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential
    together = np.mean(np.diff([one.at for one in timed]) == 0)
    assert together == pytest.approx(7 / 8, abs=0.02)
    assert traffic.poisson(requests, 50.0, seed=2) == traffic.poisson(requests, 50.0, seed=2)
    with pytest.raises(ValueError, match="rate must be above 0"):
        traffic.poisson(requests, 0.0, seed=2)


def test_token_prompts_have_the_lengths_asked_for():
    plain = traffic.chat_and_documents(50, seed=1)
    tokens = traffic.with_tokens(plain, seed=1, vocab_size=5000)
    assert [one.prompt_len for one in tokens] == [one.prompt_len for one in plain]
    assert all(0 < token < 5000 for one in tokens for token in one.prompt)
