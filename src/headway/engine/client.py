"""The front end's end of the wire: starts the engine process, sends commands in bulk, hands on what comes back."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import zmq

from headway.core.config import SchedulerConfig
from headway.engine.config import EngineConfig
from headway.engine.messages import (
    Alarm,
    Command,
    Event,
    Fatal,
    Follow,
    Followed,
    Launch,
    Line,
    Ping,
    Pong,
    Ready,
    Refused,
    Shutdown,
    Step,
    Trace,
    Traced,
    encoder,
    event_decoder,
    has_message,
)
from headway.engine.startup import Report
from headway.engine.stream import EngineDead

ALIVE_EVERY = 0.1
"""Seconds between two looks whether the engine process still lives."""
STOP_WITHIN = 5.0
"""Seconds that a stopping engine gets to end its step before it is killed."""
BURST = 16
"""Messages handled before other tasks get a turn."""
LONGEST_ADDRESS = 100
"""Bytes; a Unix socket's path may have 107."""


class EngineClient:
    """An engine process and the sockets to it, on the running event loop.

    `report` gets the lines that start-up has for a person.
    """

    def __init__(self, report: Report) -> None:
        self._loop = asyncio.get_running_loop()
        self._report = report
        self._on_event: Callable[[Step | Refused | Alarm], None] = _nobody
        self._on_dead: Callable[[EngineDead], None] = _nobody
        self._outbox: list[msgspec.Raw] = []
        self._ready: asyncio.Future[Ready] = self._loop.create_future()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._watcher: asyncio.TimerHandle | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._open = True
        self._error: EngineDead | None = None

        self._folder = _socket_folder()
        self._context = zmq.Context()
        self._commands, self._commands_address = self._bind(zmq.PUSH, "commands")
        self._events, self._events_address = self._bind(zmq.PULL, "events")
        self._events_fd = int(self._events.getsockopt(zmq.FD))
        try:
            self._loop.add_reader(self._events_fd, self._receive)
        except NotImplementedError:
            self._release()
            raise RuntimeError(
                "this event loop cannot watch sockets: run the engine on asyncio.SelectorEventLoop"
            ) from None

    def _bind(self, kind: int, name: str) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        # Unbounded: a full pipe would stall a step, and what may be in it is bounded by the live requests' max_tokens.
        socket.set_hwm(0)
        if sys.platform == "win32":
            return socket, f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        address = f"ipc://{self._folder}/{name}"
        socket.bind(address)
        return socket, address

    async def start(self, config: EngineConfig, model_path: str, loop_factory: str) -> Ready:
        """Starts the process and waits until its model is loaded.

        Raises:
            EngineDead: it could not start; the message says why.
        """
        launch = Launch(config, model_path, self._commands_address, self._events_address, loop_factory)
        self._process = _spawn(msgspec.json.encode(launch) + b"\n")
        self._watch(self._process)
        return await self._ready

    def attach(self, on_event: Callable[[Step | Refused | Alarm], None], on_dead: Callable[[EngineDead], None]) -> None:
        """Who gets the events, and why the engine ended: at once if it has, never once it was closed."""
        self._on_event = on_event
        self._on_dead = on_dead
        if self._error is not None:
            on_dead(self._error)

    @property
    def pid(self) -> int | None:
        """The engine's process id."""
        return None if self._process is None else self._process.pid

    def send(self, command: Command) -> None:
        """Queues a command; all that gather in one turn of the event loop leave as one message.

        Raises:
            OverflowError: an integer in it has more than 64 bits. The others leave without it.
        """
        written = msgspec.Raw(encoder.encode(command))
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(written)

    def _flush(self) -> None:
        if self._open and self._outbox:
            self._commands.send(encoder.encode(self._outbox))
        self._outbox.clear()

    async def ping(self) -> Pong:
        """A round trip through the engine's loop, between two steps.

        Raises:
            EngineDead: it has ended.
        """
        pong: Pong = await self._ask(Ping)
        return pong

    async def follow(self, config: SchedulerConfig) -> Followed:
        """Raises EngineDead where it has ended."""
        followed: Followed = await self._ask(lambda number: Follow(number, config))
        return followed

    async def trace(self, handle: int) -> Traced:
        """Raises EngineDead where it has ended."""
        traced: Traced = await self._ask(lambda number: Trace(number, handle))
        return traced

    async def _ask(self, command: Callable[[int], Command]) -> Any:
        """Sends a command that has a number, and waits for the answer that has the same."""
        number = next(self._numbers)
        answer = self._answers[number] = self._loop.create_future()
        try:
            self.send(command(number))
            return await answer
        finally:
            del self._answers[number]

    def _receive(self) -> None:
        # The descriptor tells of changes only: nothing would call again for what is left.
        for _ in range(BURST):
            if not (self._open and has_message(self._events)):
                return
            self._dispatch(event_decoder.decode(self._events.recv()))
        self._loop.call_soon(self._receive)

    def _dispatch(self, event: Event) -> None:
        match event:
            case Step() | Refused() | Alarm():
                self._on_event(event)
            case Pong() | Followed() | Traced():
                if (answer := self._answers.get(event.number)) is not None and not answer.done():
                    answer.set_result(event)
            case Line():
                self._report(event.text)
            case Ready() if not self._ready.done():
                self._ready.set_result(event)
            case Fatal():
                self._die(event.message)

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            self._watcher = self._loop.call_later(ALIVE_EVERY, self._watch, process)
            return
        self._receive()  # its last words, if it had any
        self._die(_how_it_ended(process.returncode))

    def _die(self, message: str) -> None:
        if not self._open:
            return
        self._release()
        self._error = EngineDead(message)
        futures: list[asyncio.Future[Any]] = [self._ready, *self._answers.values()]
        for future in futures:
            if not future.done():
                future.set_exception(self._error)
        self._on_dead(self._error)

    def _release(self) -> None:
        self._open = False
        self._loop.remove_reader(self._events_fd)
        if self._watcher is not None:
            self._watcher.cancel()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def close(self) -> None:
        """Stops the process, waits for its end and leaves nothing behind. May be called twice."""
        if self._open:
            if self._watcher is not None:
                self._watcher.cancel()
            self.send(Shutdown())
            self._flush()
        if self._process is not None:
            await self._see_off(self._process)
        self._ready.cancel()
        if self._open:
            self._release()

    async def _see_off(self, process: subprocess.Popen[bytes]) -> None:
        if self._ready.cancelled() or not self._ready.done():  # it takes no commands while it loads
            process.terminate()
        if not await _ended(process, STOP_WITHIN):
            process.kill()
            process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()


def _nobody(what: object) -> None:
    pass


def _socket_folder() -> str:
    folder = tempfile.mkdtemp(prefix="headway-")
    if len(os.fsencode(folder)) > LONGEST_ADDRESS - len("/commands"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="headway-", dir="/tmp")
    return folder


def _spawn(launch: bytes) -> subprocess.Popen[bytes]:
    """The process reads `launch`; that its standard input then stays open tells it that its parent lives."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "headway.engine.process"],
        stdin=subprocess.PIPE,
        stdout=2,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # Ctrl-C goes to the foreground group; only the parent decides what it means.
        process_group=None if sys.platform == "win32" else 0,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(launch)
        process.stdin.flush()
    return process


async def _ended(process: subprocess.Popen[bytes], within: float) -> bool:
    deadline = time.monotonic() + within
    while process.poll() is None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"the engine process was ended by {signal.Signals(-code).name}"
    return f"the engine process ended with exit code {code}"
