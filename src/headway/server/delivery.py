"""How answers reach their clients: as server-sent events, or whole; and how a client that leaves ends its request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headway.engine.stream import Delta, Stream
from headway.server.answer import ABORTED, Answer
from headway.server.errors import FAILURES, ApiError, aborted, as_api_error
from headway.server.wire import DONE, PING, event

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def collect(streams: Sequence[Stream], receive: Receive) -> list[list[Delta]]:
    """The whole output of each stream, one delta a choice. Whatever ends this early aborts them all.

    Raises:
        ClientDisconnect: the client left.
        ApiError, RequestError, EngineDead, GenerationError: a stream could not go on.
    """
    gone = False

    async def watch() -> None:
        nonlocal gone
        await until_disconnect(receive)
        gone = True
        abort_all(streams)

    watcher = asyncio.create_task(watch())
    try:
        results = [await stream.collect() for stream in streams]
    finally:
        watcher.cancel()
        abort_all(streams)
    if gone:
        raise ClientDisconnect
    if any(delta.finish_reason == ABORTED for deltas in results for delta in deltas):
        raise aborted()
    return results


def abort_all(streams: Sequence[Stream]) -> None:
    """Ends what is left of them."""
    for stream in streams:
        stream.abort()


class Inbox:
    """Several streams read as one. What one step brought them is read together."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._ready: list[int] = []
        self._waiter: asyncio.Future[None] | None = None
        for position, stream in enumerate(streams):
            stream.on_ready = partial(self._wake, position)

    def _wake(self, position: int) -> None:
        self._ready.append(position)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> list[int]:
        """Positions of the streams that have something to take (or to raise), once there is one."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        return ready


class EventStream(Response):
    """An answer as server-sent events.

    The status goes out with the first event, so that what fails before it is an HTTP error; what fails later is an
    `error` event. A client that leaves ends its requests at once.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, ping_seconds: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._answer = answer
        self._inbox = Inbox(answer.streams)
        self._ping_seconds = ping_seconds
        self._started = False
        self._silent = True
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive, send))
        try:
            await self._stream(send)
        except FAILURES as failure:
            if not self._gone:
                await self._fail(as_api_error(failure), send)
        finally:
            watcher.cancel()
            abort_all(self._answer.streams)

    async def _stream(self, send: Send) -> None:
        answer, inbox, streams = self._answer, self._inbox, self._answer.streams
        while answer.open_choices:
            ready = await inbox.wait()
            data = b"".join([answer.chunk(position, delta) for position in ready for delta in streams[position].take()])
            if data:
                await self._send(data, send)
            for position in ready:
                if (error := streams[position].error) is not None:
                    raise error
            if answer.aborted:
                raise aborted()
        await self._send(answer.last_event() + DONE, send, more=False)

    async def _send(self, data: bytes, send: Send, *, more: bool = True) -> None:
        self._silent = False
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: ApiError, send: Send) -> None:
        if not self._started:
            raise error
        await self._send(event({"error": error.fields()}), send, more=False)

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Aborts when the client leaves; meanwhile fills long silences with comments."""
        while True:
            try:
                async with asyncio.timeout(self._ping_seconds):
                    await until_disconnect(receive)
            except TimeoutError:
                if self._silent:
                    await self._send(PING, send)
                self._silent = True
            else:
                self._gone = True
                abort_all(self._answer.streams)
                return
