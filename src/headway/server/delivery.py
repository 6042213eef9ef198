"""How answers reach their clients: as server-sent events, or whole; and how a client that leaves ends its request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headway.engine.stream import Delta, Stream
from headway.server.answer import ABORTED, Answer
from headway.server.envelope import direct_send
from headway.server.errors import FAILURES, ApiError, aborted, as_api_error
from headway.server.outbox import Outbox, start
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


class EventStream(Response):
    """An answer as server-sent events.

    The status goes out with the first event, so that what fails before it is an HTTP error; what fails later is an
    `error` event. A client that leaves ends its requests at once. While a slow client's connection is full, what comes
    gathers in the streams.

    No task wakes for a token: streams call back, and the outbox sends what one turn of the event loop has brought.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, outbox: Outbox, ping_seconds: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._answer = answer
        self._outbox = outbox
        self._ping_seconds = ping_seconds
        self._ready: list[int] = []
        self._taken: list[int] = []
        self._events = b""
        self._writing: asyncio.Task[None] | None = None
        self._started = False
        self._silent = True
        self._gone = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send_start, self._send_body = send, direct_send(scope, send)
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        streams = self._answer.streams
        for position, stream in enumerate(streams):
            stream.on_ready = partial(self._wake, position)
            self._wake(position)
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._end
            await self._write(self._answer.last_event() + DONE, more=False)
        except FAILURES as failure:
            if not self._gone:
                await self._fail(as_api_error(failure))
        finally:
            watcher.cancel()
            for stream in streams:
                stream.on_ready = None
                stream.abort()

    def _wake(self, position: int) -> None:
        """The stream at `position` has something to take, or an error."""
        if not self._ready and self._writing is None:
            self._outbox.add(self)
        if position not in self._ready:
            self._ready.append(position)

    def gather(self) -> None:
        """Makes the events of what has come; called by the outbox."""
        answer, streams = self._answer, self._answer.streams
        self._taken, self._ready = self._ready, []
        if not self._end.done():
            try:
                chunks = [answer.chunk(place, delta) for place in self._taken for delta in streams[place].take()]
                self._events = b"".join(chunks)
            except Exception as error:  # __call__ handles it
                self._end.set_exception(error)

    def push(self) -> None:
        """Sends them; called by the outbox."""
        if self._end.done():
            return
        try:
            self._push()
        except Exception as error:  # __call__ handles it
            self._end.set_exception(error)

    def _push(self) -> None:
        answer, streams = self._answer, self._answer.streams
        if self._events:
            self._writing = start(self._write(self._events))
        for position in self._taken:
            if (error := streams[position].error) is not None:
                raise error
        if answer.aborted:
            raise aborted()
        if self._writing is not None:
            self._writing.add_done_callback(self._written)
        elif not answer.open_choices:
            self._end.set_result(None)

    def _written(self, writing: asyncio.Task[None]) -> None:
        """A slow client has taken what was sent; there may be more by now."""
        self._writing = None
        if self._end.done():
            return
        if (error := writing.exception()) is not None:
            self._end.set_exception(error)
        elif self._ready:
            self._outbox.add(self)
        elif not self._answer.open_choices:
            self._end.set_result(None)

    def _write(self, data: bytes, *, more: bool = True) -> Awaitable[None]:
        self._silent = False
        body = {"type": "http.response.body", "body": data, "more_body": more}
        return self._send_body(body) if self._started else self._begin(body)

    async def _begin(self, body: Message) -> None:
        self._started = True
        await self._send_start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await self._send_body(body)

    async def _fail(self, error: ApiError) -> None:
        if not self._started:
            raise error
        if self._writing is not None:
            await self._writing
        await self._write(event({"error": error.fields()}), more=False)

    async def _watch(self, receive: Receive) -> None:
        """Aborts when the client leaves; meanwhile fills long silences with comments."""
        while True:
            try:
                async with asyncio.timeout(self._ping_seconds):
                    await until_disconnect(receive)
            except TimeoutError:
                if self._silent:
                    await self._write(PING)
                self._silent = True
            else:
                self._gone = True
                abort_all(self._answer.streams)
                return
