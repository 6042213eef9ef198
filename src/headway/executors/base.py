"""The Executor protocol: something that computes batches. The core never knows which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from headway.core.batch import Batch, StepOutput


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an executor can hold: KV blocks (ids 0 .. num_blocks - 1), sequences, and their length in tokens; blocks in
    the host's memory for those that are swapped out; and slots beyond max_num_seqs, for sequences that are leaving."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    num_host_blocks: int = 0
    spare_slots: int = 0


class Executor(Protocol):
    """Computes batches in the order in which they are launched.

    `launch` returns at once where the device can work on its own; `collect` waits for that step and returns its output.
    Launching step k + 1 before k is collected is allowed: a row in both is fed its token on the device.
    """

    def capacity(self) -> Capacity: ...

    def launch(self, batch: Batch) -> Any: ...

    def done(self, ticket: Any) -> bool:
        """Whether `collect` would not have to wait."""
        ...

    def collect(self, ticket: Any) -> StepOutput: ...

    def close(self) -> None: ...
