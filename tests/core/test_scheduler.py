"""The scheduler's promises, on an executor that checks every KV cell: conservation, exactness, accounting, replay."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.batch import Batch, Swaps
from headway.core.config import PADDED, SchedulerConfig
from headway.core.event_log import replay
from headway.core.policies import POLICIES
from headway.core.request import FinishReason, RequestError
from headway.core.tenants import Tenant
from tests.core.memory import EOS, World, expected_token


def config_of(batch: int, extra: int, room: int, burst: int | None, **given) -> SchedulerConfig:
    return SchedulerConfig(
        max_batch_size=batch,
        max_num_seqs=batch + extra,
        max_num_batched_tokens=batch + room,
        burst_size=None if given["batching"] in PADDED else burst,
        **given,
    )


configs = st.builds(
    config_of,
    prefix_caching=st.booleans(),
    batching=st.sampled_from(["static", "dynamic", "continuous", "inflight"]),
    budget=st.sampled_from(["decode-first", "prefill-first"]),
    preemption=st.sampled_from(["auto", "recompute", "swap"]),
    kv_reservation=st.sampled_from(["optimistic", "predicted", "full"]),
    batch=st.integers(1, 6),
    extra=st.integers(0, 4),
    room=st.integers(0, 24),
    chunked_prefill=st.booleans(),
    max_num_partial_prefills=st.integers(1, 3),
    depth=st.integers(1, 2),
    burst=st.none() | st.integers(1, 3),
    tenants=st.dictionaries(
        st.sampled_from("abc"),
        st.builds(Tenant, weight=st.floats(0.1, 10), max_in_flight=st.none() | st.integers(1, 3)),
    ),
)
requests = st.lists(
    st.tuples(
        st.floats(0, 12),  # arrival
        st.integers(1, 20),  # prompt
        st.integers(1, 16),  # max_tokens
        st.integers(1, 24),  # natural length
        st.none() | st.floats(0, 40),  # abort after
    ),
    min_size=1,
    max_size=14,
)


def expected(
    handle: int, prompt: int, max_tokens: int, natural: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    count = min(max_tokens, natural, max_model_len - prompt)
    tokens = [expected_token(handle, prompt + i, prompt + natural - 1) for i in range(count)]
    return tokens, FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH


@settings(max_examples=150, deadline=None)
@given(
    configs,
    requests,
    st.integers(9, 40),
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(0, 2),
    st.sampled_from(["default", "fair"]),
)
def test_nothing_is_lost_whatever_happens(config, plan, num_blocks, block_size, host, spare, policy):
    """Random arrivals, lengths, aborts, tenants with limits, and pools so small that rows are preempted."""
    blocks = enough(plan, num_blocks, block_size)
    config = replace(config, policy=policy)
    world = World(config, blocks, block_size, max_model_len=40, num_host_blocks=host, spare_slots=spare)
    world.run(plan)
    check_that_nothing_is_lost(world, plan)


@settings(max_examples=150, deadline=None)
@given(configs, st.lists(st.tuples(configs, st.sampled_from(sorted(POLICIES))), min_size=1, max_size=4), requests)
def test_nothing_is_lost_when_strategies_change_after_every_step(config, others, plan):
    """Any formation, policy and budget after any other, with requests waiting, on board and lingering."""
    fixed = {"prefix_caching": config.prefix_caching, "max_num_seqs": config.seqs}
    follow = tuple(
        replace(
            other,
            policy=policy,
            max_batch_size=min(other.max_batch_size, config.max_batch_size),
            max_num_batched_tokens=config.max_num_batched_tokens,
            **fixed,
        )
        for other, policy in others
    )
    world = World(config, enough(plan, 12, 4), 4, max_model_len=40, follow=follow, num_host_blocks=5, spare_slots=1)
    world.run(plan)
    check_that_nothing_is_lost(world, plan)


def test_rows_that_ended_make_way_for_a_group_that_had_no_room_reserved():
    """Three board continuously, without room for all of their answers; then they are a padded group, whose ended rows
    keep their blocks. The last one needs them."""
    base = SchedulerConfig(
        batching="static", prefix_caching=False, max_batch_size=3, max_num_seqs=3, max_num_batched_tokens=3, depth=1
    )
    base = replace(base, chunked_prefill=False, max_num_partial_prefills=1)
    follow = tuple(
        replace(base, policy="classes", batching=batching, max_batch_size=size)
        for batching, size in (("static", 3), ("static", 1), ("static", 1), ("continuous", 3))
    )
    plan = [(0.0, 1, 1, 1, None)] * 6 + [(4.0, 1, 9, 9, None), (4.0, 20, 6, 6, None), (4.0, 8, 2, 2, None)]
    world = World(base, 12, 4, max_model_len=40, follow=follow)
    world.run(plan)
    check_that_nothing_is_lost(world, plan)


def test_the_entropy_of_a_first_token_reaches_the_predictor():
    world = World(SchedulerConfig(max_batch_size=2, max_num_batched_tokens=20, depth=1), max_model_len=64)
    for handle in range(2):
        world.add(handle, prompt_len=5, max_tokens=4)
    rows = [world.scheduler.table.row_of(handle) for handle in range(2)]
    alike = world.scheduler.table.length_group[rows].tolist()
    collect = world.executor.collect
    world.executor.collect = lambda ticket: replace(collect(ticket), entropy={0: 0.1})
    world.step()
    world.executor.collect = collect
    known, unknown = world.scheduler.table.length_group[rows].tolist()
    assert alike == [unknown, unknown]
    assert known != unknown
    world.drain()


def test_what_memory_was_sized_for_cannot_change():
    config = SchedulerConfig(max_batch_size=4, max_num_batched_tokens=64)
    world = World(config)
    for change, named in (
        ({"max_num_seqs": 9}, "seqs was set to 8"),
        ({"prefix_caching": False}, "prefix_caching was set to True"),
        ({"max_num_batched_tokens": 65}, "sized for 64"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"batching": "nonsense"}, "nonsense"),
    ):
        with pytest.raises(ValueError, match=named):
            world.scheduler.follow(replace(config, **change), 0.0)
        assert world.scheduler.config is config
    assert not world.events, "what was refused is not in the log"


def test_a_policy_keeps_its_account_when_only_a_limit_changes():
    config = SchedulerConfig(max_batch_size=4, max_num_batched_tokens=64, policy="fair")
    world = World(config)
    before = world.scheduler.strategies.policy
    world.scheduler.follow(replace(config, burst_size=1), 0.0)
    assert world.scheduler.strategies.policy is before
    world.scheduler.follow(replace(config, policy="fcfs"), 0.0)
    assert world.scheduler.strategies.policy is not before


def enough(plan, num_blocks: int, block_size: int) -> int:
    """Blocks: as many as given, or as the longest request needs."""
    longest = max(prompt + max_tokens for _, prompt, max_tokens, _, _ in plan)
    return max(num_blocks, -(-longest // block_size))


def check_that_nothing_is_lost(world: World, plan) -> None:
    assert set(world.finished) == set(range(len(plan)))
    for handle, (arrival, prompt, max_tokens, natural, abort_after) in enumerate(plan):
        finished = world.finished[handle]
        tokens, reason = expected(handle, prompt, max_tokens, natural, 40)
        if finished.reason == FinishReason.ABORT:
            assert abort_after is not None
            assert world.tokens[handle] == tokens[: len(world.tokens[handle])]
        else:
            assert world.tokens[handle] == tokens
            assert finished.reason == reason
        assert finished.output_len == len(world.tokens[handle])
        assert finished.prompt_len == prompt
        assert sum(finished.state_times.values()) == pytest.approx(finished.finished - arrival, abs=1e-9)
        assert all(seconds >= 0 for seconds in finished.state_times.values())

    scheduler = world.scheduler
    assert scheduler.pool.available == scheduler.pool.num_blocks
    assert len(scheduler.table) == len(scheduler.waiting) == len(scheduler.running) == 0
    assert not scheduler.board._saved
    scheduler.host.settle()
    assert scheduler.host.available == scheduler.host.num_blocks

    check_that_the_batches_are(world.executor.batches, replay(world.events, world.fresh_scheduler()))


def check_that_the_batches_are(expected: list[Batch], batches: list[Batch]) -> None:
    assert len(batches) == len(expected)
    for first, second in zip(expected, batches, strict=True):
        for name in ("rows", "slots", "starts", "num_tokens", "samples", "block_slots", "block_index", "block_ids"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name), err_msg=name)
        for field in fields(Swaps):
            np.testing.assert_array_equal(getattr(first.swaps, field.name), getattr(second.swaps, field.name))
        np.testing.assert_array_equal(first.pad_tokens, second.pad_tokens)
        assert first.load == second.load


@settings(max_examples=100, deadline=None)
@given(configs, st.sampled_from(sorted(POLICIES)), requests, st.integers(9, 40), st.integers(1, 5))
def test_the_short_way_of_decoding_leads_where_the_general_rules_do(config, policy, plan, num_blocks, block_size):
    world = World(replace(config, policy=policy), enough(plan, num_blocks, block_size), block_size, max_model_len=40)
    world.run(plan)
    general = world.fresh_scheduler()
    general._decode.launch = lambda step_id, now: None
    check_that_the_batches_are(world.executor.batches, replay(world.events, general))
    assert general.counters == world.scheduler.counters


@settings(max_examples=60, deadline=None)
@given(configs, requests)
def test_limits_hold_in_every_step(config, plan):
    world = World(config, num_blocks=400, block_size=2, max_model_len=40)
    world.run(plan)
    for batch in world.executor.batches:
        assert len(batch.rows) <= config.max_batch_size
        if config.batching in ("static", "dynamic"):
            continue  # a rectangle knows no budget
        assert len(batch.admitted) <= (config.burst_size or config.seqs)
        if config.chunked_prefill or config.budget == "prefill-first":
            assert batch.total_tokens <= config.max_num_batched_tokens
        else:
            fresh = {new.slot: len(new.token_ids) for new in batch.admitted}
            for slot, start, tokens in zip(batch.slots, batch.starts, batch.num_tokens, strict=True):
                whole = fresh[int(slot)] - start if int(slot) in fresh else 1
                assert tokens == whole, "a prompt was cut although chunking is off"


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 2), st.integers(1, 12))
def test_two_that_do_not_fit_together_both_finish(num_requests, depth, block_size):
    """A pool that holds one request at its full length, and no two: no deadlock, no livelock."""
    config = SchedulerConfig(max_batch_size=4, max_num_batched_tokens=8, depth=depth)
    world = World(config, num_blocks=-(-39 // block_size), block_size=block_size, max_model_len=40)
    for handle in range(num_requests):
        world.add(handle, prompt_len=10, max_tokens=30)
    world.drain(limit=2_000)
    assert len(world.finished) == num_requests
    assert all(len(tokens) == 30 for tokens in world.tokens.values())


def test_a_decode_waits_for_no_prompt():
    """With a long prompt coming in, every row on board still gets a token in every step."""
    world = World(SchedulerConfig(max_batch_size=4, max_num_batched_tokens=8, depth=1), max_model_len=64)
    world.add(0, prompt_len=4, max_tokens=30)
    world.step()
    world.add(1, prompt_len=40, max_tokens=2)
    for _ in range(5):
        world.step()
    assert len(world.tokens[0]) == 6
    assert [batch.total_tokens for batch in world.executor.batches[1:6]] == [8] * 5


def test_several_prompts_share_a_step():
    config = SchedulerConfig(max_batch_size=4, max_num_batched_tokens=12, max_num_partial_prefills=3, depth=1)
    world = World(config, max_model_len=64)
    for handle, prompt_len in enumerate([30, 30, 2]):
        world.add(handle, prompt_len, max_tokens=2)
    world.step()
    assert sorted(world.executor.batches[0].num_tokens.tolist()) == [2, 5, 5]


def test_fragmentation_is_the_empty_part_of_held_blocks():
    world = World(SchedulerConfig(max_batch_size=4, max_num_batched_tokens=64, depth=1), block_size=4, max_model_len=64)
    assert world.scheduler.kv_fragmentation == 0.0
    world.add(0, prompt_len=5, max_tokens=9)
    world.add(1, prompt_len=8, max_tokens=9)
    world.step()
    assert world.scheduler.kv_fragmentation == pytest.approx(1 - 13 / 16)


def test_nobody_is_evicted_in_vain():
    """A row that would not fit even alone with the free blocks of all later ones evicts nobody."""
    world = World(
        SchedulerConfig(max_batch_size=4, max_num_batched_tokens=64, depth=1), num_blocks=10, max_model_len=40
    )
    world.add(0, prompt_len=16, max_tokens=20)
    world.add(1, prompt_len=12, max_tokens=8)
    world.drain()
    assert world.scheduler.counters.num_preemptions == 1  # the later one, once
    assert [len(world.tokens[h]) for h in (0, 1)] == [20, 8]
    assert world.finished[0].preemptions == 0
    assert world.finished[1].state_times["preempted"] > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_closing_a_hundred_in_mid_stream_returns_every_block_within_the_depth(depth):
    config = SchedulerConfig(max_batch_size=100, max_num_batched_tokens=200, depth=depth)
    world = World(config, num_blocks=2000, max_model_len=64)
    for handle in range(100):
        world.add(handle, prompt_len=5, max_tokens=50)
    for _ in range(10):
        world.step()
    for handle in range(100):
        world.abort(handle)
    assert len(world.finished) == 100
    in_flight = len(world.executor.touched)
    collected = len(world.executor.batches) - in_flight
    world.drain()
    assert len(world.executor.batches) - collected <= depth
    assert world.scheduler.pool.available == 2000


def test_a_failed_step_ends_only_its_own_requests():
    world = World(SchedulerConfig(max_batch_size=2, max_num_batched_tokens=20, depth=1), max_model_len=64)
    for handle in range(3):
        world.add(handle, prompt_len=5, max_tokens=4)
    collect = world.executor.collect

    def broken(ticket):
        world.executor.collect = collect
        collect(ticket)
        raise RuntimeError("the device is on fire")

    world.executor.collect = broken
    world.drain()
    assert {h: f.reason for h, f in world.finished.items()} == {
        0: FinishReason.ERROR,
        1: FinishReason.ERROR,
        2: FinishReason.LENGTH,
    }
    assert "on fire" in world.finished[0].message
    assert world.scheduler.pool.available == world.num_blocks


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "code"),
    [(0, 1, None), (64, 1, "context_length_exceeded"), (10, 54, "context_length_exceeded")],
)
def test_what_can_never_be_served_is_refused_at_once(prompt_len, max_tokens, code):
    world = World(SchedulerConfig(max_batch_size=2, max_num_batched_tokens=20), num_blocks=8, max_model_len=64)
    with pytest.raises(RequestError) as error:
        world.add(0, prompt_len, max_tokens)
    assert error.value.code == code
    assert world.loop.idle


def test_every_wait_has_its_reason():
    """One row, a batch of one: the second waits for a row; what it waits adds up to the time the first takes."""
    world = World(
        SchedulerConfig(max_batch_size=1, max_num_seqs=1, max_num_batched_tokens=32, depth=1), max_model_len=64
    )
    world.add(0, prompt_len=4, max_tokens=6)
    world.add(1, prompt_len=4, max_tokens=2)
    world.drain()
    assert world.finished[0].state_times == pytest.approx({"prefill": 1.0, "decode": 5.0})
    assert world.finished[1].state_times == pytest.approx({"wait_row": 6.0, "prefill": 1.0, "decode": 1.0})


def test_prompts_in_chunks_never_evict_each_other():
    """What a prompt on board will still need is promised to it: the next one comes when both fit."""
    config = SchedulerConfig(
        max_batch_size=8, max_num_batched_tokens=8, depth=1, max_num_partial_prefills=4, backfill=False
    )
    world = World(config, num_blocks=16, block_size=4, max_model_len=64)
    for handle in range(12):
        world.add(handle, prompt_len=30, max_tokens=2)
    world.drain()
    assert world.scheduler.counters.num_preemptions == 0


def test_eviction_that_would_not_help_is_not_done():
    world = World(
        SchedulerConfig(max_batch_size=4, max_num_batched_tokens=64, depth=1), num_blocks=20, max_model_len=40
    )
    for handle in range(3):
        world.add(handle, prompt_len=8, max_tokens=8)
    world.step()
    scheduler = world.scheduler
    last = np.array([scheduler.table.row_of(2)])
    held = int(scheduler.table.blocks[last[0]])
    assert scheduler._lineup._room.evict(last, held + 1, now=1.0) == (0, 0)
    assert scheduler.counters.num_preemptions == 0
    assert scheduler._lineup._room.evict(last, held, now=1.0) == (held, 0)
    world.drain()
    assert [len(world.tokens[h]) for h in range(3)] == [8, 8, 8]
