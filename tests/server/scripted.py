"""The real engine loop on an executor whose model is a rule, so that tests of the server know every token beforehand.

The model repeats its prompt: the token at position p is the prompt's at (p + choice) % prompt_len. Some prompts are
orders: one that holds FAIL makes its step fail, one that holds DIE ends the engine process.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from headway.core.batch import Admission, Batch, Logprobs, StepOutput
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop, make_scheduler
from headway.engine.startup import Report
from headway.engine.text import Tokenizer
from headway.executors.base import Capacity

FACTORY = "tests.server.scripted:build_loop"
NEVER = "tests.server.scripted:build_never"
FAIL = "please fail"
DIE = "please die"
LOGPROB = -0.5
NUM_BLOCKS = 8192
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024


class ScriptedExecutor:
    """Takes `step_seconds` a step."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig, step_seconds: float) -> None:
        self._tokenizer = tokenizer
        self._capacity = Capacity(NUM_BLOCKS, BLOCK_SIZE, config.scheduler.seqs, config.max_model_len or MAX_MODEL_LEN)
        self._step_seconds = step_seconds
        self._sequences: dict[int, Admission] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, batch: Batch) -> Batch:
        self._sequences |= {admission.slot: admission for admission in batch.admitted}
        return batch

    def done(self, batch: Batch) -> bool:
        return True

    def collect(self, batch: Batch) -> StepOutput:
        time.sleep(self._step_seconds)
        positions = (batch.starts + batch.num_tokens)[batch.samples]
        admissions = [self._sequences[slot] for slot in batch.slots[batch.samples].tolist()]
        tokens = [self._token(of, int(at)) for of, at in zip(admissions, positions, strict=True)]
        logprobs = [
            None if of.params.logprobs is None else _logprobs(token, of.params.logprobs)
            for of, token in zip(admissions, tokens, strict=True)
        ]
        counts, elapsed = batch.samples.astype(np.int32), self._step_seconds
        return StepOutput(batch.step_id, counts, np.array(tokens, np.int32), logprobs, elapsed=elapsed)

    def _token(self, of: Admission, position: int) -> int:
        if position == of.prompt_len:
            self._obey(self._tokenizer.decode(of.token_ids[: of.prompt_len].tolist()))
        return int(of.token_ids[(position + of.choice) % of.prompt_len])

    def _obey(self, prompt: str) -> None:
        if FAIL in prompt:
            raise RuntimeError("asked to fail")
        if DIE in prompt:
            os._exit(3)

    def close(self) -> None:
        pass


def _logprobs(token: int, k: int) -> Logprobs:
    """The token at LOGPROB, then the ids that follow it, each half as likely in logs."""
    return Logprobs(LOGPROB, 1, [token + i for i in range(k)], [LOGPROB * 2**i for i in range(k)])


def build_loop(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """An EngineLoop for the engine process; HEADWAY_TEST_STEP sets the seconds of a step."""
    tokenizer = Tokenizer.load(Path(model_path))
    executor = ScriptedExecutor(tokenizer, config, float(os.environ.get("HEADWAY_TEST_STEP", "0.001")))
    report("scripted model loaded")
    return EngineLoop(make_scheduler(config, executor.capacity()), executor, time.monotonic)


def build_never(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """A model that takes longer to load than anyone waits."""
    while True:
        time.sleep(1)
