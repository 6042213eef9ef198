"""What a caller reads: a stream of deltas. Text is made here, as tokens arrive, once for every reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from msgspec import Struct

from headway.core.batch import Logprobs
from headway.core.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from headway.engine.stop import StopStrings
    from headway.engine.text import Detokenizer


class EngineDead(RuntimeError):
    """The engine process has ended; no stream of it can go on."""


class EngineClosed(EngineDead):
    """It was ended by its owner."""


class GenerationError(RuntimeError):
    """The engine could not go on with this request; others are served."""


class Delta(Struct, gc=False):
    """What one choice has generated since its last delta; a slow reader finds several tokens merged into one.

    `text` never splits a character nor holds what could still be the beginning of a stop string. `logprobs` are aligned
    with `token_ids` (None where the request asked for none). `finish_reason` ("stop", "length", "abort") comes with a
    choice's last delta; `stop_reason` is the stop string or stop token id that ended it (None for the model's eos).
    `completion_tokens` counts this choice's tokens so far.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Choice:
    """One sequence: its tokens, its text, and how much of both the reader has taken.

    first_token, last_token: seconds on the front end's monotonic clock (0.0 before there is one).
    """

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_pending",
        "_settled",
        "_show_stop_token",
        "_stops",
        "_taken",
        "cached_tokens",
        "finish_reason",
        "first_token",
        "handle",
        "index",
        "last_token",
        "queued",
        "stop_reason",
        "stream",
        "token_ids",
    )

    def __init__(
        self,
        stream: Stream,
        index: int,
        handle: int,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
    ) -> None:
        params = stream.params
        self.stream = stream
        self.index = index
        self.handle = handle
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cached_tokens = 0
        self.first_token = 0.0
        self.last_token = 0.0
        self.queued = False
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = params.min_tokens
        self._show_stop_token = params.include_stop_str_in_output
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._pending = ""
        self._settled = 0  # tokens whose text is out
        self._taken = 0

    def push(self, token_id: int, logprobs: Logprobs | None, ends: bool) -> bool:
        """Adds a token; `ends` says that it is the stop token. Returns whether there is something to read."""
        self.token_ids.append(token_id)
        if logprobs is not None and self._logprobs is not None:
            self._logprobs.append(logprobs)
        if ends and not self._show_stop_token:
            return False
        text = self._detokenizer.push(token_id)
        return bool(text) and self._show(text)

    def _show(self, text: str) -> bool:
        if self._stops is not None and len(self.token_ids) >= self._min_tokens:
            text, stopped_by = self._stops.push(text)
            if stopped_by is not None:
                self._pending += text
                self._end(FinishReason.STOP.label, stopped_by)
                return True
            if not text:
                return False
        self._pending += text
        self._settled = len(self.token_ids)
        return True

    def finish(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """Ends the choice; what was held back comes out. Without effect where a stop string has ended it before."""
        if self.finish_reason is not None:
            return
        tail = self._detokenizer.flush()
        if tail:
            self._show(tail)
        if self.finish_reason is None:
            if self._stops is not None:
                self._pending += self._stops.flush()
            self._end(reason.label, stop_reason)

    def _end(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self._settled = len(self.token_ids)

    def take(self) -> Delta:
        """All that has come since the last take."""
        start, end = self._taken, self._settled
        delta = Delta(
            self.index,
            self._pending,
            self.token_ids[start:end],
            None if self._logprobs is None else self._logprobs[start:end],
            self.finish_reason,
            self.stop_reason,
            len(self.stream.prompt_token_ids),
            end,
            self.cached_tokens,
        )
        self._pending = ""
        self._taken = end
        self.queued = False
        return delta


class Stream:
    """One request's output: an asynchronous iterator of Delta over all its choices.

    Closing it, or cancelling the task that waits in it, aborts the request (`break` alone does not: use `async with`).
    A reader that wants no task wake-up per token sets `on_ready`, which is called (on the event loop's thread, it may
    not block) when there is something to take after there was nothing, and calls `take()` when it likes.
    Nothing is lost by reading slowly: what has not been taken merges.

    request_id: given or made. prompt: the text, None where token ids were given. seed: the one in effect, drawn where
    the request had none. arrival: seconds on the monotonic clock. tenant: whose it is ("": nobody's in particular).
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        arrival: float,
        abort: Callable[[Stream], None],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.params = params
        self.arrival = arrival
        self.tenant = ""
        self.choices: list[Choice] = []
        self.error: Exception | None = None
        self.on_ready: Callable[[], None] | None = None
        self._abort = abort
        self._queue: list[Choice] = []
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False

    @property
    def seed(self) -> int | None:
        return self.params.seed

    @property
    def done(self) -> bool:
        """Nothing more will come (though something may be left to take)."""
        return self.error is not None or all(choice.finish_reason is not None for choice in self.choices)

    def abort(self) -> None:
        """Ends the request where it is; its choices finish with "abort". Without effect once it is done."""
        if not self.done:
            self._abort(self)

    def take(self) -> list[Delta]:
        """What is there now, at most one delta a choice; does not wait.

        Raises:
            EngineDead, GenerationError, RequestError: once what came before it has been taken.
        """
        if not self._queue and self.error is not None:
            raise self.error
        queue, self._queue = self._queue, []
        return [choice.take() for choice in queue]

    async def collect(self) -> list[Delta]:
        """Waits for the end and returns what has not been taken, one delta a choice, in the order of their index."""
        self._wants_all = True
        while not self.done:
            await self._wait()
        if self.error is not None:
            raise self.error
        return sorted(self.take(), key=lambda delta: delta.index)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._queue:
            if self.error is not None:
                raise self.error
            if self.done:
                raise StopAsyncIteration
            await self._wait()
        return self._queue.pop(0).take()

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.abort()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def queue(self, choice: Choice) -> bool:
        """For the router: `choice` has something to read. Returns whether the reader should be notified."""
        if choice.queued:
            return False
        choice.queued = True
        self._queue.append(choice)
        return len(self._queue) == 1

    def notify(self) -> None:
        """For the router: wakes the reader."""
        if self.on_ready is not None:
            self.on_ready()
        waiter = self._waiter
        if waiter is not None and not waiter.done() and (not self._wants_all or self.done):
            waiter.set_result(None)
