"""`headway serve`: the HTTP process, from its sockets to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import uvicorn

from headway.core.errors import ModelError
from headway.engine.api import Engine, EngineConfig, EngineDead
from headway.engine.startup import BUILD_LOOP
from headway.server.app import create_app
from headway.server.listen import ListenError, listen
from headway.server.pulse import Pulse
from headway.server.settings import ServerSettings

try:
    from uvloop import new_event_loop
except ImportError:  # not made for every platform
    from asyncio import new_event_loop  # type: ignore[assignment]

STOP_SECONDS = 3
"""What answers get to be written to their end after the engine has been closed."""
LOOK_SECONDS = 1.0
"""How often the server looks whether its engine lives, and says what it does."""


def serve(
    config: EngineConfig | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    settings: ServerSettings | None = None,
    *,
    loop_factory: str = BUILD_LOOP,
) -> int:
    """Serves a model over HTTP until SIGINT or SIGTERM. Blocks; belongs to the main thread.

    It listens at once and answers 503 while the model is being loaded. Port 0 takes a free one and prints it. Returns
    the exit status: 0 after a signal, 1 where the server could not start (one line on standard error says why).
    """
    try:
        sockets = listen(host, port)
    except ListenError as error:
        return _failed(str(error))
    settings = settings or ServerSettings()
    serving = _Serving(_with_tenants(config or EngineConfig(), settings), sockets, settings)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(serving.run(loop_factory))


def _with_tenants(config: EngineConfig, settings: ServerSettings) -> EngineConfig:
    """The tenants that the keys name, with their weights and limits."""
    if settings.keys is None:
        return config
    return replace(config, scheduler=replace(config.scheduler, tenants=settings.keys.tenants))


def _failed(why: str) -> int:
    print(f"headway serve: {why}", file=sys.stderr)
    return 1


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal means is decided below."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Serving:
    """One run of the server. A first signal lets requests in flight go on for a while, a second one does not."""

    def __init__(self, config: EngineConfig, sockets: list[socket.socket], settings: ServerSettings) -> None:
        self._config = config
        self._sockets = sockets
        self._grace = settings.grace_seconds
        self._status_line = settings.status_line
        self._app = create_app(settings=settings)
        self._service = self._app.state.service
        self._http = _Server(
            uvicorn.Config(
                self._app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=settings.keep_alive_seconds,
                timeout_graceful_shutdown=int(settings.grace_seconds) + STOP_SECONDS,
            )
        )

    async def run(self, loop_factory: str) -> int:
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)
        http = asyncio.create_task(self._http.serve(self._sockets))
        engine: Engine | None = None
        try:
            engine = await self._start(loop_factory)
            if engine is not None:
                self._service.attach(engine)
                gc.collect()
                gc.freeze()  # what start-up made stays; collections need not walk it again and again
                print(f"headway serves {engine.model_name} at {self._url()}/v1", flush=True)
                await self._until_stopped(engine)
        except (ModelError, EngineDead, ValueError) as error:
            return _failed(str(error))
        finally:
            await self._end(http, engine)
        return 0

    def _signalled(self) -> None:
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def _start(self, loop_factory: str) -> Engine | None:
        """The engine, or None if a signal came before it was ready."""
        starting = asyncio.create_task(
            Engine.start(self._config, report=lambda line: print(line, flush=True), loop_factory=loop_factory)
        )
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return None

    async def _until_stopped(self, engine: Engine) -> None:
        told = False
        pulse = Pulse(engine, self._service.tally, _write, time.monotonic()) if self._status_line else None
        while not self._stop.is_set():
            if engine.error is not None and not told:
                told = True
                print(f"headway serve: {engine.error}; answering 503 until restarted", file=sys.stderr, flush=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), LOOK_SECONDS)
            if pulse is not None:
                pulse.beat(time.monotonic())

    async def _end(self, http: asyncio.Task[None], engine: Engine | None) -> None:
        """Accepts no more, lets answers go on for the grace time or until hurried, cuts the rest off."""
        self._service.stopping = True
        self._http.should_exit = True
        hurried = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((http, hurried), timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if engine is not None:
            await engine.close()
        await http
        self._service.close()

    def _url(self) -> str:
        host, port = self._sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
