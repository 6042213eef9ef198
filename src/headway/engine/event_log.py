"""The event log as a file: all that drove the scheduler, to be replayed elsewhere.

A record is a little-endian uint32 length and that many bytes of msgpack: [kind, now, facts ...].
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from headway.core.batch import Logprobs, StepOutput
from headway.core.config import SchedulerConfig
from headway.core.request import FinishReason, Request
from headway.core.scheduler import Event

_LENGTH = struct.Struct("<I")


class _Output(msgspec.Struct, array_like=True):
    """StepOutput with its arrays as raw little-endian int32."""

    step_id: int
    counts: bytes
    token_ids: bytes
    logprobs: list[Logprobs | None] | None
    elapsed: float
    device_time: float
    failed: dict[int, str]
    entropy: dict[int, float]
    copy_time: float


class EventLog:
    """Appends events to a file. Call it with each one; what has been written survives a killed process."""

    def __init__(self, path: str | Path) -> None:
        self._file: BinaryIO = open(path, "wb", buffering=1 << 16)  # noqa: SIM115 (lives as long as the engine)
        self._encoder = msgspec.msgpack.Encoder()

    def __call__(self, event: Event) -> None:
        kind, now, *facts = event
        if kind == "commit":
            facts[1] = _pack(facts[1])
        record = self._encoder.encode([kind, now, *facts])
        self._file.write(_LENGTH.pack(len(record)) + record)
        if kind == "commit":
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_event_log(path: str | Path) -> Iterator[Event]:
    """The events of a file, in order. A last record that was cut off by a crash is left out."""
    with open(path, "rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            record = file.read(length)
            if len(record) < length:
                return
            kind, now, *facts = msgspec.msgpack.decode(record)
            if kind == "add":
                facts = [msgspec.convert(facts[0], Request)]
            elif kind == "abort":
                facts[1] = FinishReason(facts[1])
            elif kind == "follow":
                facts = [msgspec.convert(facts[0], SchedulerConfig)]
            elif kind == "commit":
                facts[1] = _unpack(msgspec.convert(facts[1], _Output))
            yield (kind, now, *facts)


def _pack(output: StepOutput) -> _Output:
    return _Output(
        output.step_id,
        output.counts.astype("<i4").tobytes(),
        output.token_ids.astype("<i4").tobytes(),
        output.logprobs,
        output.elapsed,
        output.device_time,
        output.failed,
        output.entropy,
        output.copy_time,
    )


def _unpack(output: _Output) -> StepOutput:
    return StepOutput(
        output.step_id,
        np.frombuffer(output.counts, "<i4"),
        np.frombuffer(output.token_ids, "<i4"),
        output.logprobs,
        output.elapsed,
        output.device_time,
        output.failed,
        output.entropy,
        output.copy_time,
    )
