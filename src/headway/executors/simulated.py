"""SimulatedExecutor: computes nothing, takes the time that a given function says, on a virtual clock.

The property tests, the paced benchmarks and the twin run the real engine loop on it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headway.core.batch import Admission, Batch, Ints, StepOutput
from headway.executors.base import Capacity

StepTime = Callable[[Batch], float]
"""Seconds that a batch takes on the device."""


class VirtualClock:
    """Time that passes only when someone says so, in seconds."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def __call__(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        self._now = max(self._now, time)


class SimulatedExecutor:
    """A device that works through its launched steps in order, one after the other.

    The token at position p of a sequence is `p % vocab_size`, until `output_len(admission)` tokens have been generated:
    then it is `eos`. Without `output_len` sequences run into their max_tokens. `copy_time`: seconds that copying a
    block to or from the host's memory takes; a step copies first and then computes.
    """

    def __init__(
        self,
        capacity: Capacity,
        step_time: StepTime,
        clock: VirtualClock,
        *,
        output_len: Callable[[Admission], int] | None = None,
        eos: int = -2,
        vocab_size: int = 32_000,
        copy_time: float = 0.0,
    ) -> None:
        self._capacity = capacity
        self._step_time = step_time
        self._clock = clock
        self._output_len = output_len
        self._eos = eos
        self._vocab_size = vocab_size
        self._copy_time = copy_time
        self._last = np.full(capacity.max_num_seqs + capacity.spare_slots, np.iinfo(np.int32).max, np.int64)
        self._free_at = 0.0

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, batch: Batch) -> tuple[Batch, Ints, float, float]:
        if self._output_len is not None:
            for new in batch.admitted:
                self._last[new.slot] = new.prompt_len + self._output_len(new) - 1
        positions = (batch.starts + batch.num_tokens)[batch.samples]
        tokens = np.where(
            positions >= self._last[batch.slots[batch.samples]], self._eos, positions % self._vocab_size
        ).astype(np.int32)
        elapsed = self._step_time(batch) + self._copy_time * len(batch.swaps)
        self._free_at = max(self._clock(), self._free_at) + elapsed
        return batch, tokens, self._free_at, elapsed

    def done(self, ticket: tuple[Batch, Ints, float, float]) -> bool:
        return self._clock() >= ticket[2]

    def collect(self, ticket: tuple[Batch, Ints, float, float]) -> StepOutput:
        batch, tokens, end, elapsed = ticket
        self._clock.advance_to(end)
        return StepOutput(
            batch.step_id,
            batch.samples.astype(np.int32),
            tokens,
            elapsed=elapsed,
            device_time=elapsed,
            copy_time=self._copy_time * len(batch.swaps),
        )

    def close(self) -> None:
        pass
