"""The engine process: drives the loop, takes commands between steps, sends what each step brought.

It is started by `client.py` with a Launch on its standard input, and lives no longer than that stays open.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import TYPE_CHECKING

import msgspec
import zmq

from headway.core.batch import Finished, StepEvents
from headway.core.config import SchedulerConfig
from headway.core.errors import ModelError
from headway.core.request import RequestError
from headway.engine.messages import (
    Abort,
    Add,
    Alarm,
    Command,
    EngineStats,
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
    command_decoder,
    encoder,
    has_message,
    to_step,
)
from headway.engine.startup import make_loop
from headway.engine.watchdog import Watchdog

if TYPE_CHECKING:
    from headway.engine.loop import EngineLoop

STATS_EVERY = 0.1
"""Seconds between two snapshots that go with a step."""
POLL_RESOLUTION = 0.001
"""Seconds: less than that no socket can be waited for."""
LONGEST_POLL = 1e6
"""Seconds: no socket can be waited for much longer in C's integers, except without an end."""
STOP_WITHIN = 5.0
"""Seconds that an orphaned engine gets to end its step."""
LINGER = 1.0
"""Seconds that the last messages get to leave."""
EXPECTED_ERRORS = (ModelError, RequestError, ValueError, OSError, MemoryError)
"""What a wrong model or setting raises: a line is enough. Anything else is a defect and shows its traceback."""


class EngineServer:
    """Serves one loop over two sockets until it is told to stop."""

    def __init__(self, launch: Launch) -> None:
        self._context = zmq.Context()
        self._commands = self._connect(zmq.PULL, launch.commands)
        self._events = self._connect(zmq.PUSH, launch.events)
        self._loop: EngineLoop
        self._watchdog: Watchdog
        self._stopping = False
        self._terminated = False
        self._ended: list[Finished] = []  # by aborts, since the last message
        self._news = True  # something has changed since the last snapshot
        self._snapshot_at = -math.inf
        self._wake, self._waker = socket.socketpair()
        self._poller = zmq.Poller()
        self._poller.register(self._commands, zmq.POLLIN)
        self._poller.register(self._wake, zmq.POLLIN)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        connection = self._context.socket(kind)
        connection.set_hwm(0)
        connection.connect(address)
        return connection

    def run(self, launch: Launch) -> None:
        """Builds the loop and serves it. However that ends, the front end hears of it."""
        try:
            self._loop = make_loop(
                launch.loop_factory, launch.config, launch.model_path, lambda line: self._send(Line(line))
            )
        except Exception as error:
            return self._send(Fatal(_one_line(error)))
        try:
            self._stop_on_sigterm()
            self._watchdog = Watchdog(self._loop, launch.config.watchdog_seconds or math.inf)
            self._send(Ready(self._loop.executor.capacity(), self._loop.stats()))
            self._serve()
            if self._terminated:
                self._send(Fatal("the engine process was asked to end by SIGTERM"))
        except Exception as error:
            self._send(Fatal(f"the engine failed: {_one_line(error)}"))
        finally:
            self._loop.close()

    def close(self) -> None:
        self._context.destroy(linger=int(LINGER * 1000))
        self._wake.close()
        self._waker.close()

    def _stop_on_sigterm(self) -> None:
        self._waker.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno())
        signal.signal(signal.SIGTERM, self._terminate)

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._stopping = self._terminated = True

    def _send(self, event: Event) -> None:
        self._events.send(encoder.encode(event))

    def _serve(self) -> None:
        while self._take_commands():
            events = self._loop.step()
            if events is None:
                self._rest()
            else:
                self._send_step(events)

    def _take_commands(self) -> bool:
        """Obeys what has come. Returns whether to go on."""
        while has_message(self._commands):
            for command in command_decoder.decode(self._commands.recv()):
                self._obey(command)
        return not self._stopping

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                self._news = True
                try:
                    self._loop.add(request)
                except RequestError as error:
                    self._send(Refused.of(request.handle, error))
            case Abort(handle, reason):
                self._news = True
                events = self._loop.abort(handle, reason)
                if events is not None:
                    self._ended += events.finished
            case Ping(number):
                self._send_ends()
                self._send(Pong(number, self._loop.stats()))
            case Follow(number, config):
                self._send(Followed(number, self._follow(config)))
            case Trace(number, handle):
                self._send_ends()
                self._send(Traced(number, self._loop.timeline(handle)))
            case Shutdown():
                self._stopping = True

    def _follow(self, config: SchedulerConfig) -> str | None:
        """Returns why not, if it cannot be."""
        try:
            self._loop.follow(config)
        except ValueError as error:
            return str(error)
        return None

    def _send_step(self, events: StepEvents) -> None:
        if self._ended:
            events.finished.extend(self._ended)
            self._ended.clear()
        now = time.monotonic()
        if now - self._snapshot_at >= STATS_EVERY:
            self._snapshot_at = now
            self._send(to_step(events, self._loop.stats()))
        else:
            self._send(to_step(events))
        self._news = True

    def _send_ends(self, stats: EngineStats | None = None) -> None:
        """What happened outside a step."""
        if self._ended or stats is not None:
            self._send(Step(b"", b"", self._ended, None, stats))
            self._ended.clear()

    def _rest(self) -> None:
        """Nothing to launch: says how things stand, then sleeps until the loop wants to be asked or word comes."""
        if self._news and not self._loop.holding:
            self._send_ends(self._loop.stats())
            self._news = False
        self._send_ends()
        if self._watch():
            return
        seconds = min(self._loop.wait_until, self._watchdog.due) - self._loop.clock()
        if 0 < seconds < POLL_RESOLUTION:
            time.sleep(seconds)
        else:
            self._poller.poll(None if seconds > LONGEST_POLL else max(0, int(seconds * 1000)))

    def _watch(self) -> bool:
        """Whether the watchdog has done something, so that there may be work again."""
        alarm = self._watchdog.look()
        if alarm is None:
            return False
        print(f"{alarm.dump}\nheadway watchdog: {alarm.line}", file=sys.stderr, flush=True)
        self._send(Alarm(alarm.line, self._loop.scheduler.config))
        self._ended += alarm.ended.finished if alarm.ended is not None else []
        self._news = True
        return True


def _one_line(error: Exception) -> str:
    if isinstance(error, EXPECTED_ERRORS):
        text = str(error)
    else:
        traceback.print_exception(error)
        text = f"{type(error).__name__}: {error}"
    return " ".join(text.split()) or type(error).__name__


def _read_launch() -> Launch:
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            raise SystemExit("headway.engine.process is started by headway itself, with its orders on standard input")
        line += more
    return msgspec.json.decode(line, type=Launch)


def _end_with_parent(launch: Launch) -> None:
    """Waits for the parent's end of standard input to close; then nobody is left to clean up after."""
    while os.read(0, 1):
        pass
    if launch.events.startswith("ipc://"):
        shutil.rmtree(os.path.dirname(launch.events.removeprefix("ipc://")), ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_WITHIN)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = _read_launch()
    threading.Thread(target=_end_with_parent, args=(launch,), daemon=True).start()

    server = EngineServer(launch)
    server.run(launch)
    server.close()


if __name__ == "__main__":
    main()
