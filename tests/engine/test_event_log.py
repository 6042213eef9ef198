"""The log file holds all that drove the scheduler: read back, it gives the same batches; cut off, what came before."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Logprobs, StepOutput
from headway.core.config import SchedulerConfig
from headway.core.event_log import replay
from headway.engine.event_log import EventLog, read_event_log
from tests.core.memory import World


def logged_world(path) -> World:
    world = World(SchedulerConfig(max_batch_size=3, max_num_batched_tokens=9), num_blocks=12, max_model_len=40)
    log = EventLog(path)
    world.scheduler.log = log
    for handle in range(6):
        world.add(handle, prompt_len=5 + handle, max_tokens=12, natural=8 + handle)
    for _ in range(6):
        world.step()
    world.abort(3)
    world.drain()
    log.close()
    return world


def test_read_back_it_gives_the_same_batches(tmp_path):
    path = tmp_path / "events"
    world = logged_world(path)
    again = replay(read_event_log(path), world.fresh_scheduler())
    assert len(again) == len(world.executor.batches) > 20
    for first, second in zip(world.executor.batches, again, strict=True):
        np.testing.assert_array_equal(first.rows, second.rows)
        np.testing.assert_array_equal(first.num_tokens, second.num_tokens)
        np.testing.assert_array_equal(first.block_ids, second.block_ids)


def test_a_record_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / "events"
    logged_world(path)
    whole = list(read_event_log(path))
    cut = tmp_path / "cut"
    cut.write_bytes(path.read_bytes()[:-3])
    assert len(list(read_event_log(cut))) == len(whole) - 1


def test_outputs_come_back_as_they_were(tmp_path):
    path = tmp_path / "events"
    log = EventLog(path)
    output = StepOutput(
        3,
        np.array([1, 0, 1], np.int32),
        np.array([17, -5], np.int32),
        [Logprobs(-0.5, 1, [17, 2], [-0.5, -1.5]), None],
        0.25,
        0.2,
        {1: "not a number"},
        copy_time=0.05,
    )
    log(("commit", 1.5, 3, output))
    log.close()
    ((kind, now, step_id, back),) = read_event_log(path)
    assert (kind, now, step_id) == ("commit", 1.5, 3)
    np.testing.assert_array_equal(back.counts, output.counts)
    np.testing.assert_array_equal(back.token_ids, output.token_ids)
    assert (back.logprobs, back.elapsed, back.device_time, back.failed, back.copy_time) == (
        output.logprobs,
        output.elapsed,
        output.device_time,
        output.failed,
        output.copy_time,
    )
