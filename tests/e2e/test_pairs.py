"""Every formation with every policy: the tokens are those of one request alone."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from tests.e2e.naive import Naive, compare

from headway.core import strategies
from headway.core.config import SchedulerConfig
from headway.core.policies import POLICIES
from headway.core.request import Request, SamplingParams, Slo
from headway.core.scheduler import Scheduler
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop
from headway.engine.startup import BUILD_LOOP, make_loop, silent

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def case(tiny_model_dir):
    """Requests of all lengths, classes, tenants and priorities, some with a common beginning; and what is right."""
    draw = random.Random(5)
    shared = [draw.randrange(1000, 40000) for _ in range(20)]
    prompts = [
        shared * (i % 2) + [draw.randrange(1000, 40000) for _ in range(draw.choice((1, 5, 17, 40)))] for i in range(12)
    ]
    requests = [
        Request(
            id=f"r{i}",
            handle=i,
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=MAX_TOKENS, temperature=float(i % 3 == 2), seed=i, ignore_eos=True),
            arrival=0.0,
            priority=i % 3,
            slo=Slo(deadline=1.0 + i % 5),
            tenant=f"t{i % 3}",
            request_class=("realtime", "batch")[i % 2],
        )
        for i, prompt in enumerate(prompts)
    ]
    naive = Naive(tiny_model_dir)
    return requests, [naive.decode(one.prompt_token_ids, one.params) for one in requests]


def config_for(batching: str, policy: str) -> SchedulerConfig:
    return SchedulerConfig(
        batching=batching,
        policy=policy,
        static_timeout=0.01,
        max_batch_size=5,
        max_num_batched_tokens=24,
        depth=2,
    )


@pytest.fixture(scope="module")
def executor(tiny_model_dir):
    settings = EngineConfig(
        model=str(tiny_model_dir),
        dtype="float32",
        threads=1,
        max_model_len=80,
        kv_cache_memory=BYTES_PER_TOKEN * 16 * 28,
        scheduler=config_for("continuous", "fcfs"),
    )
    loop = make_loop(BUILD_LOOP, settings, str(tiny_model_dir), silent)
    yield loop.executor
    loop.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batching", strategies.FORMATIONS)
def test_pair(executor, case, batching, policy):
    serve_all(executor, case, [config_for(batching, policy)])


def test_cycling_through_all_pairs_with_requests_in_flight(executor, case):
    pairs = [config_for(batching, policy) for policy in POLICIES for batching in strategies.FORMATIONS]
    serve_all(executor, case, pairs)


def serve_all(executor, case, configs: list[SchedulerConfig]) -> None:
    """Serves the requests, each step under the next configuration, again and again until all have had a step."""
    holds = executor.capacity()
    scheduler = Scheduler.of(configs[0], holds.num_blocks, holds.block_size, holds.max_model_len)
    while scheduler.counters.num_steps < len(configs):
        serve(executor, case, scheduler, configs)


def serve(executor, case, scheduler: Scheduler, configs: list[SchedulerConfig]) -> None:
    requests, expected = case
    loop = EngineLoop(scheduler, executor, time.monotonic)
    tokens: dict[int, list[int]] = {one.handle: [] for one in requests}
    begin = time.monotonic()
    for one in requests[:8]:
        loop.add(replace(one, arrival=begin))
    late = list(requests[8:])
    while late or not loop.idle:
        if late and sum(map(len, tokens.values())) >= 4 * (9 - len(late)):  # they come while others decode
            loop.add(replace(late.pop(0), arrival=time.monotonic()))
            if not late:
                loop.no_more()
        events = loop.step()
        if events is not None:
            for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
                tokens[handle].append(token)
            scheduler.follow(configs[scheduler.counters.num_steps % len(configs)], time.monotonic())
        scheduler.check()
        assert time.monotonic() - begin < 60, "it does not end"
    for one, truth in zip(requests, expected, strict=True):
        name = f"{scheduler.config.batching}, {scheduler.config.policy}, request {one.handle}"
        compare(name, truth, tokens[one.handle])
    assert not scheduler.pool.usage
