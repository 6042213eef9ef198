"""Starting, stopping, and what the server says when its engine is not there, full or dead."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from headway.server.app import create_app
from headway.server.listen import ListenError, listen
from headway.server.run import serve
from headway.server.settings import ServerSettings
from tests.server.conftest import Server, check, running
from tests.server.scripted import DIE, FAIL, NEVER

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "On and on. ", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def fragile(tiny_model_dir: Path) -> Iterator[Server]:
    """A server of one waiting place, which the tests of this module use up in their order."""
    with running(tiny_model_dir, max_waiting=1, step=0.01) as server:
        yield server


def test_full_queue(fragile: Server) -> None:
    with httpx.Client(base_url=fragile.url, timeout=30) as client:
        body = LONG | {"prompt": ["a b"] * 128, "max_tokens": 200}
        with client.stream("POST", COMPLETIONS, json=body) as first:
            lines = first.iter_lines()
            next(lines)
            for stream in (False, True):
                refused = client.post(COMPLETIONS, json={"prompt": ["a", "b"], "stream": stream, "deadline_ms": 1})
                check(refused, 429, None, "rate_limit_exceeded")
                assert int(refused.headers["retry-after"]) >= 1
                assert "x-should-retry" not in refused.headers
        metrics = client.get("/metrics").text
        assert 'headway:requests_rejected_total{engine="0",model_name="test-model",reason="queue_full"} 2.0' in metrics
        missed = 'headway:requests_slo_missed_total{engine="0",model_name="test-model",request_class="none"} 2.0'
        assert missed in metrics


def test_step_that_fails_ends_its_requests_only(fragile: Server) -> None:
    with httpx.Client(base_url=fragile.url, timeout=30) as client:
        for stream in (False, True):
            failed = client.post(COMPLETIONS, json={"prompt": FAIL, "max_tokens": 3, "stream": stream})
            check(failed, 500, None, "generation_failed")
            assert failed.headers["x-should-retry"] == "false"
        assert client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 3}).status_code == 200


def test_error_after_the_first_byte_is_an_event_and_the_end(fragile: Server) -> None:
    with httpx.Client(base_url=fragile.url, timeout=30) as client:
        with client.stream("POST", COMPLETIONS, json=LONG) as stream:
            lines = stream.iter_lines()
            assert '"choices"' in next(lines)
            assert client.post(COMPLETIONS, json={"prompt": FAIL, "max_tokens": 3}).status_code == 500
            datas = [line for line in lines if line]
        assert stream.status_code == 200
    assert datas[-1].startswith('data: {"error":{"message":"')
    assert "asked to fail" in datas[-1]
    assert not any("[DONE]" in data for data in datas)


def test_engine_that_dies(fragile: Server) -> None:
    with httpx.Client(base_url=fragile.url, timeout=30) as client:
        with client.stream("POST", COMPLETIONS, json=LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            check(client.post(COMPLETIONS, json={"prompt": DIE}), 503, None, "engine_dead")
            *_, last = (line for line in lines if line)
        assert '"code":"engine_dead"' in last
        for path in ("/health", "/ping", "/v1/models", "/load"):
            check(client.get(path), 503, None, "engine_dead")
        refused = client.post(COMPLETIONS, json={"prompt": "a"})
        check(refused, 503, None, "engine_dead")
        assert refused.headers["x-should-retry"] == "false"
        assert client.get("/version").status_code == 200
        assert "vllm:num_requests_running" in client.get("/metrics").text


def test_not_ready_while_the_model_is_being_loaded(tiny_model_dir: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(tiny_model_dir, port=port, factory=NEVER)
    try:
        health = _first_answer(f"http://127.0.0.1:{port}/health")
        check(health, 503, None, "not_ready")
        assert int(health.headers["retry-after"]) > 0
        for path in ("/v1/models", "/metrics", "/load"):
            check(httpx.get(f"http://127.0.0.1:{port}{path}"), 503, None, "not_ready")
        check(httpx.post(f"http://127.0.0.1:{port}/tokenize", json={"prompt": "a"}), 503, None, "not_ready")
    finally:
        ended = server.stop()
    assert ended == (0, "")


def _first_answer(url: str) -> httpx.Response:
    until = time.monotonic() + 30
    while True:
        try:
            return httpx.get(url)
        except httpx.ConnectError:
            assert time.monotonic() < until
            time.sleep(0.05)


def _wait_until_refused(url: str) -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            httpx.get(url)
        except httpx.TransportError:
            return
    raise AssertionError(f"{url} still answers")


def test_signal_lets_requests_end(tiny_model_dir: Path) -> None:
    server = Server(tiny_model_dir, step=0.01).wait_ready()
    body = LONG | {"max_tokens": 120}
    with (
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("POST", COMPLETIONS, json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        _wait_until_refused(f"{server.url}/health")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    status, errors = server.stop()
    assert status == 0
    assert errors == ""


def test_grace_ends_and_what_is_left_is_told_so(tiny_model_dir: Path) -> None:
    server = Server(tiny_model_dir, step=0.02, settings="grace_seconds=0.3").wait_ready()
    with (
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("POST", COMPLETIONS, json=LONG) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1].startswith('data: {"error":')
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "aborted"
    assert "the server is stopping" in error["message"]
    assert server.stop() == (0, "")


def test_what_is_left_without_a_stream_may_be_tried_again(tiny_model_dir: Path) -> None:
    server = Server(tiny_model_dir, step=0.02, settings="grace_seconds=0.3").wait_ready()
    with ThreadPoolExecutor(1) as user:
        asked = user.submit(httpx.post, f"{server.url}{COMPLETIONS}", json=LONG | {"stream": False}, timeout=30)
        server.wait_for(lambda load: load["server_load"] == 1)
        server.signal(signal.SIGTERM)
        check(asked.result(), 503, None, "aborted")
        assert asked.result().headers["retry-after"] == "5"
    assert server.stop() == (0, "")


def test_second_signal_does_not_wait(tiny_model_dir: Path) -> None:
    server = Server(tiny_model_dir, step=0.05, settings="grace_seconds=60").wait_ready()
    with (
        httpx.Client(base_url=server.url, timeout=30) as client,
        client.stream("POST", COMPLETIONS, json=LONG) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.signal(signal.SIGINT)
        time.sleep(0.3)
        began = time.monotonic()
        server.signal(signal.SIGINT)
        list(lines)
        assert server.stop() == (0, "")
    assert time.monotonic() - began < 10


def test_port_in_use(fragile: Server, capsys: pytest.CaptureFixture[str]) -> None:
    port = int(fragile.url.rpartition(":")[2])
    assert serve(None, "127.0.0.1", port) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"headway serve: port {port} on 127.0.0.1 is in use")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("no.such.host.invalid", 8000, "no.such.host.invalid"),
        ("203.0.113.7", 8000, "is not an address of this machine"),
        ("127.0.0.1", 70000, "between 0 and 65535"),
    ],
)
def test_address_that_cannot_be_listened_on(capsys: pytest.CaptureFixture[str], host: str, port: int, why: str) -> None:
    assert serve(None, host, port) == 1
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_model_that_is_not_there() -> None:
    code = (
        "import sys; from headway.server.run import serve; from headway.engine.api import EngineConfig\n"
        "sys.exit(serve(EngineConfig('/no/such/folder'), port=0))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "/no/such/folder" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_every_address_of_a_host_gets_the_same_port() -> None:
    sockets = listen("localhost", 0)
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
        port = sockets[0].getsockname()[1]
        with pytest.raises(ListenError, match="in use"):
            listen("localhost", port)
    finally:
        for bound in sockets:
            bound.close()


def test_headers(fragile: Server) -> None:
    """Of answers and of errors: the request's id, the time that it took, CORS."""
    with httpx.Client(base_url=fragile.url) as client:
        for path in ("/version", "/health", "/no/such/path"):
            answer = client.get(path, headers={"X-Request-Id": "my-id.1", "Origin": "http://page.example"})
            assert answer.headers["x-request-id"] == "my-id.1"
            assert int(answer.headers["openai-processing-ms"]) >= 0
            assert answer.headers["access-control-allow-origin"] == "*"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        made = {
            client.get("/version", headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("", "a b")
        }
        assert len(made) == 2
        assert all(name.startswith("req-") for name in made)
        preflight = client.options(
            COMPLETIONS,
            headers={
                "Origin": "http://page.example",
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization, content-type",
            },
        )
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == "*"
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["access-control-allow-headers"] == "authorization, content-type"
        assert "access-control-allow-origin" not in client.get("/version").headers


async def test_defect_is_told_in_the_usual_form() -> None:
    app = create_app()
    app.state.service.live_engine = None  # as a mistake of ours would
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        answer = await client.get("/health", headers={"X-Request-Id": "mine"})
    check(answer, 500, None, "internal_error")
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-should-retry"] == "false"


def test_origins_can_be_limited() -> None:
    settings = ServerSettings(cors_origins=("http://good.example",))
    with TestClient(create_app(settings=settings)) as client:
        good = client.get("/version", headers={"Origin": "http://good.example"})
        assert good.headers["access-control-allow-origin"] == "http://good.example"
        assert good.headers["vary"] == "Origin"
        bad = client.get("/version", headers={"Origin": "http://bad.example"})
        assert "access-control-allow-origin" not in bad.headers
