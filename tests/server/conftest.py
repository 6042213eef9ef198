"""Real servers in processes of their own, on the scripted engine (scripted.py) unless a test says otherwise."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from openai import OpenAI

from headway.engine.text import Tokenizer
from tests.server import scripted

ROOT = Path(__file__).parents[2]
MODEL = "test-model"
START = """
import sys
from headway.core.config import SchedulerConfig
from headway.engine.api import EngineConfig
from headway.server.run import serve
from headway.server.settings import ServerSettings
config = EngineConfig({model!r}, served_model_name={name!r}, max_waiting={max_waiting}, dtype="float32", threads=1,
                      kv_cache_memory=64_000_000, scheduler=SchedulerConfig(max_batch_size=128, max_num_seqs=128))
sys.exit(serve(config, {host!r}, {port}, ServerSettings({settings}), loop_factory={factory!r}))
"""


class Server:
    """A server process. `url` once it is ready."""

    def __init__(
        self,
        model: Path,
        *,
        step: float = 0.001,
        settings: str = "",
        host: str = "127.0.0.1",
        port: int = 0,
        max_waiting: int = 4096,
        factory: str = scripted.FACTORY,
    ) -> None:
        code = START.format(
            model=str(model),
            name=MODEL,
            max_waiting=max_waiting,
            host=host,
            port=port,
            settings=settings,
            factory=factory,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", code],
            cwd=ROOT,
            env=os.environ | {"HEADWAY_TEST_STEP": str(step)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> Self:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "http://" in line:
                self.url = line.split(" at ")[1].strip().removesuffix("/v1")
                return self
        raise AssertionError(f"the server did not start: {self.stop()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def stop(self) -> tuple[int, str]:
        """Its exit status and what it wrote to standard error."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def load(self) -> dict[str, Any]:
        load: dict[str, Any] = httpx.get(f"{self.url}/load").json()
        return load

    def wait_for(self, holds: Callable[[dict[str, Any]], bool], within: float = 5) -> dict[str, Any]:
        """The first load for which it holds. While the engine is busy its figures may be a tenth of a second old."""
        until = time.monotonic() + within
        while not holds(load := self.load()):
            assert time.monotonic() < until, load
            time.sleep(0.02)
        return load

    def wait_until_idle(self, within: float = 5) -> None:
        """Nothing runs, waits or holds KV blocks after `within` seconds at most."""
        self.wait_for(lambda load: load["server_load"] == 0 and load["kv_cache_usage"] == 0, within)


@contextmanager
def running(*args: Any, **kwargs: Any) -> Iterator[Server]:
    """A server that has become ready; it must end cleanly and quietly."""
    server = Server(*args, **kwargs)
    try:
        yield server.wait_ready()
    finally:
        status, errors = server.stop()
    assert status == 0, errors
    assert "Traceback" not in errors, errors


@pytest.fixture(scope="session")
def server(tiny_model_dir: Path) -> Iterator[Server]:
    with running(tiny_model_dir) as server:
        yield server


@pytest.fixture(scope="session")
def slow_server(tiny_model_dir: Path) -> Iterator[Server]:
    """A step takes 20 ms, so that requests are still under way when the test comes to them; pings come early."""
    with running(tiny_model_dir, step=0.02, settings="ping_seconds=0.05") as server:
        yield server


@pytest.fixture(scope="session")
def words(tiny_model_dir: Path) -> Tokenizer:
    """The server's tokenizer."""
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def openai(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON of a stream's events, of which the last must be [DONE]."""
    datas = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block.startswith("data: ")]
    assert datas[-1] == "[DONE]"
    return [json.loads(data) for data in datas[:-1]]


def check(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    """The answer is an OpenAI error of this status that names this field."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
