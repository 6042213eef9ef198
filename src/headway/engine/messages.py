"""The wire between the front end and the engine process: msgpack, arrays rather than maps.

Commands go down as one list of whatever has gathered, events come up one a step. Core types travel as they are.
"""

from __future__ import annotations

import numpy as np
import zmq
from msgspec import Struct, msgpack

from headway.core.batch import Finished, Logprobs, StepEvents
from headway.core.config import SchedulerConfig
from headway.core.request import FinishReason, Request, RequestError, Unattainable
from headway.core.timeline import Span
from headway.engine.config import EngineConfig
from headway.engine.loop import LoopStats
from headway.executors.base import Capacity

EngineStats = LoopStats
"""What the engine was doing at its latest snapshot."""


class Launch(Struct, frozen=True):
    """All that an engine process is started with, as one line of JSON on its standard input.

    `commands`, `events`: ZeroMQ addresses that the front end has bound. `loop_factory`: "module:function" with the
    signature of build_loop.
    """

    config: EngineConfig
    model_path: str
    commands: str
    events: str
    loop_factory: str


class Add(Struct, frozen=True, array_like=True, tag=0):
    """Serve this request."""

    request: Request


class Abort(Struct, frozen=True, array_like=True, tag=1):
    """End this request; it is reported as finished with `reason`. An unknown handle is ignored."""

    handle: int
    reason: FinishReason


class Ping(Struct, frozen=True, array_like=True, tag=2):
    """Answer with a Pong between two steps."""

    number: int


class Follow(Struct, frozen=True, array_like=True, tag=4):
    """From the next step on, schedule as `config` says; answer with a Followed of this number."""

    number: int
    config: SchedulerConfig


class Trace(Struct, frozen=True, array_like=True, tag=5):
    """Say where the time of this request has gone so far; answer with a Traced of this number."""

    number: int
    handle: int


class Shutdown(Struct, frozen=True, array_like=True, tag=3):
    """Stop without finishing what is under way."""


class Line(Struct, frozen=True, array_like=True, tag=10):
    """A line about what start-up does, for a person."""

    text: str


class Ready(Struct, frozen=True, array_like=True, tag=11):
    """The model is loaded and requests may come."""

    capacity: Capacity
    stats: EngineStats


class Step(Struct, frozen=True, array_like=True, tag=12):
    """A StepEvents. handles: int64[k], token_ids: int32[k], as little-endian bytes; logprobs where asked for.

    `stats` comes a few times a second and whenever the engine has nothing left to do.
    """

    handles: bytes
    token_ids: bytes
    finished: list[Finished]
    logprobs: list[Logprobs | None] | None = None
    stats: EngineStats | None = None


class Refused(Struct, frozen=True, array_like=True, tag=13):
    """A request that can never be served here (a RequestError), or not as promised (Unattainable): then `retry_after`
    says how many seconds it would have waited."""

    handle: int
    message: str
    param: str | None
    code: str | None
    retry_after: float | None = None

    @classmethod
    def of(cls, handle: int, error: RequestError) -> Refused:
        retry_after = error.retry_after if isinstance(error, Unattainable) else None
        return cls(handle, error.message, error.param, error.code, retry_after)

    @property
    def error(self) -> RequestError:
        if self.retry_after is not None:
            return Unattainable(self.message, self.retry_after)
        return RequestError(self.message, param=self.param, code=self.code)


class Pong(Struct, frozen=True, array_like=True, tag=14):
    """The answer to Ping `number`."""

    number: int
    stats: EngineStats


class Followed(Struct, frozen=True, array_like=True, tag=16):
    """The answer to Follow `number`; `error` says why nothing has changed."""

    number: int
    error: str | None


class Traced(Struct, frozen=True, array_like=True, tag=17):
    """The answer to Trace `number`; None where no such request is live."""

    number: int
    timeline: list[Span] | None


class Alarm(Struct, frozen=True, array_like=True, tag=18):
    """The watchdog had to act; what it said, and how requests are scheduled now."""

    line: str
    config: SchedulerConfig


class Fatal(Struct, frozen=True, array_like=True, tag=15):
    """The engine has ended; why, in one line."""

    message: str


Command = Add | Abort | Ping | Follow | Trace | Shutdown
Event = Line | Ready | Step | Refused | Pong | Followed | Traced | Alarm | Fatal

encoder = msgpack.Encoder()
command_decoder = msgpack.Decoder(list[Command])
event_decoder: msgpack.Decoder[Event] = msgpack.Decoder(Event)


# As plain integers: this is asked at every step, and converting the enumerations costs more than asking.
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Whether a receive would return at once; a quarter of what an unsuccessful one costs."""
    return bool(int(socket.getsockopt(_EVENTS)) & _POLLIN)


def to_step(events: StepEvents, stats: EngineStats | None = None) -> Step:
    """The message for `events`."""
    return Step(
        events.handles.astype("<i8", copy=False).tobytes(),
        events.token_ids.astype("<i4", copy=False).tobytes(),
        events.finished,
        events.logprobs,
        stats,
    )


def handles_of(step: Step) -> list[int]:
    handles: list[int] = np.frombuffer(step.handles, "<i8").tolist()
    return handles


def token_ids_of(step: Step) -> list[int]:
    token_ids: list[int] = np.frombuffer(step.token_ids, "<i4").tolist()
    return token_ids
