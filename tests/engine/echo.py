"""The real engine loop on an executor whose model repeats its prompt: output token i is the prompt's at i % prompt_len.

A prompt that begins with FAIL makes its step fail; one that begins with BREAK breaks the loop itself.
"""

from __future__ import annotations

import os
import time

import numpy as np

from headway.core.batch import Admission, Batch, Logprobs, StepOutput
from headway.core.errors import ModelError
from headway.core.formation import Formation
from headway.core.table import Rows
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop, make_scheduler
from headway.engine.startup import Report
from headway.executors.base import Capacity

FAIL, BREAK = 1000, 1001
BLOCK_SIZE = 16
MAX_MODEL_LEN = 2048


def echo(prompt: list[int], count: int) -> list[int]:
    """What the model makes of a prompt."""
    return [prompt[i % len(prompt)] for i in range(count)]


class EchoExecutor:
    """Takes `step_seconds` a step. Each token has logprob -position and, of the ids beside it, the next k."""

    def __init__(self, capacity: Capacity, step_seconds: float) -> None:
        self._capacity = capacity
        self._step_seconds = step_seconds
        self._seats: dict[int, Admission] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, batch: Batch) -> Batch:
        for new in batch.admitted:
            if new.token_ids[0] == BREAK:
                raise RuntimeError("this is broken\nbeyond repair")
            self._seats[new.slot] = new
        return batch

    def done(self, batch: Batch) -> bool:
        return True

    def collect(self, batch: Batch) -> StepOutput:
        time.sleep(self._step_seconds)
        ends = (batch.starts + batch.num_tokens)[batch.samples].tolist()
        seats = [self._seats[slot] for slot in batch.slots[batch.samples].tolist()]
        if any(seat.token_ids[0] == FAIL for seat in seats):
            raise FloatingPointError("not a number")
        tokens = [int(s.token_ids[(end - s.prompt_len) % s.prompt_len]) for s, end in zip(seats, ends, strict=True)]
        logprobs = [
            None
            if (k := seat.params.logprobs) is None
            else Logprobs(-float(end), 1, [t + i for i in range(k)], [0.0] * k)
            for seat, end, t in zip(seats, ends, tokens, strict=True)
        ]
        return StepOutput(batch.step_id, batch.samples.astype(np.int32), np.array(tokens, np.int32), logprobs)

    def close(self) -> None:
        pass


def build_loop(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """ECHO_STEP: seconds of a step. ECHO_BLOCKS: how many KV blocks there are."""
    report(f"echoing {os.path.basename(model_path)}")
    capacity = Capacity(
        int(os.environ.get("ECHO_BLOCKS", "4096")),
        BLOCK_SIZE,
        config.scheduler.seqs,
        config.max_model_len or MAX_MODEL_LEN,
    )
    executor = EchoExecutor(capacity, float(os.environ.get("ECHO_STEP", "0")))
    return EngineLoop(make_scheduler(config, capacity), executor, time.monotonic)


def bad_model(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    raise ModelError("the pool holds 3 tokens:\n raise --kv-cache-memory")


def bad_code(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    raise KeyError("w_q")


def sudden_end(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    os._exit(3)


def never_ready(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    time.sleep(60)
    raise AssertionError


class Shut(Formation):
    """Lets nobody in."""

    def may_join(self, queue: Rows, board: Rows, more: bool, now: float) -> int:
        return 0


def stuck(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """A loop whose formation lets nobody in."""
    loop = build_loop(config, model_path, report)
    loop.scheduler.strategies.formation = Shut()
    return loop
