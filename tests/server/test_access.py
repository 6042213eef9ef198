"""Keys on a real server: who gets in, as whom, with what, and what is refused how."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MODEL, Server, check, running

KEYS = """
sk-alpha: {tenant: alpha, weight: 2, priority: [0, 5], request_classes: [batch], min_deadline_ms: 60000}
sk-narrow: {tenant: narrow, in_flight: 2}
sk-few: {tenant: few, requests_per_minute: 2}
sk-short: {tenant: short, tokens_per_minute: 60}
sk-admin: {tenant: ops, scope: admin}
"""
BODY = {"prompt": "One two three four.", "max_tokens": 8, "ignore_eos": True}
SCHEDULER = "/admin/scheduler"


@pytest.fixture(scope="module")
def guarded(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS, encoding="utf-8")
    settings = f"keys=__import__('headway.server.keys').server.keys.Keyring.read({str(path)!r})"
    with running(tiny_model_dir, step=0.005, settings=settings) as server:
        yield server


def client(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


def complete(server: Server, key: str, **more: Any) -> Any:
    with client(server, key) as api:
        extra = {"ignore_eos": True} | more
        return api.completions.create(model=MODEL, prompt="One two three four.", max_tokens=8, extra_body=extra)


def http(server: Server, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60)


def metric(server: Server, name: str) -> float:
    with http(server, "sk-admin") as admin:
        lines = admin.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer sk-wrong"}, {"authorization": "Basic sk-alpha"}])
def test_without_a_key_nobody_gets_in(guarded: Server, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=guarded.url, headers=headers) as anybody:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            response = anybody.post(path, json=BODY)
            check(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
            assert response.json()["error"]["type"] == "authentication_error"
        for path in ("/v1/models", "/metrics", "/load", SCHEDULER, "/nothing"):
            check(anybody.get(path), 401, None, "invalid_api_key")
        for path in ("/health", "/ping", "/version"):
            assert anybody.get(path).status_code == 200


def test_what_openai_raises(guarded: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as wrong:
        complete(guarded, "sk-wrong")
    assert wrong.value.code == "invalid_api_key"
    with pytest.raises(openai.PermissionDeniedError) as denied:
        complete(guarded, "sk-alpha", priority=-1)
    assert denied.value.param == "priority"
    assert "0 to 5" in denied.value.message
    with pytest.raises(openai.PermissionDeniedError) as denied:
        complete(guarded, "sk-alpha", request_class="realtime")
    assert denied.value.param == "request_class"
    assert "batch" in denied.value.message
    assert complete(guarded, "sk-alpha", priority=5, request_class="batch").usage.completion_tokens == 8


def test_a_browser_may_ask_first(guarded: Server) -> None:
    headers = {"origin": "http://a", "access-control-request-method": "POST"}
    assert httpx.options(f"{guarded.url}/v1/completions", headers=headers).status_code == 204
    refused = httpx.post(f"{guarded.url}/v1/completions", json=BODY, headers={"origin": "http://a"})
    assert refused.headers["access-control-allow-origin"] == "*"


def test_the_tenant_is_the_keys_and_the_class_too(guarded: Server) -> None:
    name = 'headway:tenant_tokens_total{engine="0",model_name="test-model",tenant="%s"}'
    tokens = {tenant: metric(guarded, name % tenant) for tenant in ("alpha", "ops")}
    missed = 'headway:requests_slo_attained_total{engine="0",model_name="test-model",request_class="batch"}'
    attained = metric(guarded, missed)
    answer = complete(guarded, "sk-alpha", user="ops", deadline_ms=1)  # clamped to a minute, and kept
    computed = answer.usage.prompt_tokens + 7
    cached = answer.usage.prompt_tokens_details.cached_tokens
    guarded_totals = {tenant: metric(guarded, name % tenant) for tenant in ("alpha", "ops")}
    assert guarded_totals["alpha"] - tokens["alpha"] == computed - cached
    assert guarded_totals["ops"] == tokens["ops"]
    assert metric(guarded, missed) == attained + 1


def test_requests_a_minute(guarded: Server) -> None:
    before = metric(guarded, "headway:requests_rejected_total")
    with http(guarded, "sk-few") as few:
        first = few.post("/v1/completions", json=BODY)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert few.post("/v1/completions", json=BODY).status_code == 200
        refused = few.post("/v1/completions", json=BODY)
    check(refused, 429, None, "rate_limit_exceeded")
    assert 0 < int(refused.headers["retry-after"]) <= 30
    assert "2 requests per minute" in refused.json()["error"]["message"]
    with pytest.raises(openai.RateLimitError):
        complete(guarded, "sk-few")
    assert metric(guarded, "headway:requests_rejected_total") == before + 2


def test_tokens_a_minute(guarded: Server) -> None:
    with http(guarded, "sk-short") as short:
        assert short.post("/v1/completions", json=BODY | {"max_tokens": 100}).status_code == 200
        refused = short.post("/v1/completions", json=BODY)
    check(refused, 429, None, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 30  # it has more than a minute's tokens to make up for
    assert "60 tokens per minute" in refused.json()["error"]["message"]


def test_in_flight_is_a_wait(guarded: Server) -> None:
    """Six at a time of a tenant that may have two in flight: all are answered, and the others' wait has its name."""
    before = metric(
        guarded, 'headway:request_wait_seconds_total{engine="0",model_name="test-model",reason="wait_quota"}'
    )
    with ThreadPoolExecutor(6) as users, http(guarded, "sk-narrow") as narrow:
        answers = list(users.map(lambda _: narrow.post("/v1/completions", json=BODY | {"max_tokens": 40}), range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6
    after = metric(
        guarded, 'headway:request_wait_seconds_total{engine="0",model_name="test-model",reason="wait_quota"}'
    )
    assert after > before


def test_a_tenant_reads_its_own_timelines_and_an_admin_all(guarded: Server) -> None:
    id = complete(guarded, "sk-narrow", request_id="of narrow alone").id
    statuses = {}
    for key in ("sk-narrow", "sk-alpha", "sk-admin"):
        with http(guarded, key) as holder:
            statuses[key] = holder.get(f"/v1/requests/{id}/timeline").status_code
    assert statuses == {"sk-narrow": 200, "sk-alpha": 404, "sk-admin": 200}


def test_what_one_tenant_calls_its_requests_is_nothing_to_the_others(guarded: Server) -> None:
    """All use the same id at the same time, and each sees its own answer under it."""
    lengths = {"sk-narrow": 60, "sk-alpha": 70, "sk-admin": 80}

    def ask(key: str) -> httpx.Response:
        with http(guarded, key) as holder:
            return holder.post("/v1/completions", json=BODY | {"max_tokens": lengths[key], "request_id": "same"})

    with ThreadPoolExecutor(3) as users:
        answers = dict(zip(lengths, users.map(ask, lengths), strict=True))
    for key, answer in answers.items():
        assert answer.status_code == 200, answer.text
        with http(guarded, key) as holder:
            timeline = holder.get(f"/v1/requests/{answer.json()['id']}/timeline").json()
        if key != "sk-admin":  # an admin sees the latest of any tenant
            assert timeline["choices"][0]["completion_tokens"] == lengths[key]


@pytest.mark.parametrize("key", ["sk-narrow", "sk-wide"])
def test_a_tenant_that_fills_the_queue_leaves_places_for_the_others(
    tiny_model_dir: Path, tmp_path: Path, key: str
) -> None:
    """Whether its requests are held by its limit or not."""
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS + "sk-wide: {tenant: wide}\n", encoding="utf-8")
    settings = f"ping_seconds=0.5, keys=__import__('headway.server.keys').server.keys.Keyring.read({str(path)!r})"
    flood = BODY | {"max_tokens": 1000, "n": 32, "stream": True}
    with (
        running(tiny_model_dir, step=0.02, settings=settings, max_waiting=72) as server,  # 200 places
        ThreadPoolExecutor(8) as users,
        httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {key}"}, timeout=60) as greedy,
    ):
        gone = threading.Event()

        def ask(_: int) -> int:
            with greedy.stream("POST", "/v1/completions", json=flood) as answer:
                while answer.status_code == 200 and not gone.wait(0.02):
                    pass
                return answer.status_code

        asked = [users.submit(ask, i) for i in range(8)]
        try:
            with http(server, "sk-admin") as admin:
                until = time.monotonic() + 30
                while admin.get("/load").json()["server_load"] < 96 or sum(one.done() for one in asked) < 5:
                    assert time.monotonic() < until
                    time.sleep(0.05)
                assert admin.get("/load").json()["server_load"] == 96
            with http(server, "sk-alpha") as alpha:
                assert alpha.post("/v1/completions", json=BODY | {"n": 20}).status_code == 200
        finally:
            gone.set()
        assert sorted(one.result() for one in asked) == [200] * 3 + [429] * 5


def test_only_an_admin_key_controls_and_from_anywhere(guarded: Server) -> None:
    with http(guarded, "sk-alpha") as alpha, http(guarded, "sk-admin") as admin:
        for path in (SCHEDULER, "/metrics", "/load"):
            check(alpha.get(path), 403, None, "insufficient_scope")
        check(alpha.post(SCHEDULER, json={"policy": "fair"}), 403, None)
        forwarded = {"x-forwarded-for": "203.0.113.7"}
        shown = admin.post(SCHEDULER, json={"policy": "fair"}, headers=forwarded).json()
        assert shown["policy"] == "fair"
        assert shown["tenants"]["alpha"] == {"weight": 2.0, "max_in_flight": None}
        assert shown["tenants"]["narrow"] == {"weight": 1.0, "max_in_flight": 2}
        changed = admin.post(SCHEDULER, json={"tenants": {"alpha": {"weight": 3}}}).json()
        assert changed["tenants"] == {"alpha": {"weight": 3.0, "max_in_flight": None}}
        bad = admin.post(SCHEDULER, json={"tenants": {"alpha": {"weight": 0}}})
        check(bad, 400, None)
        assert admin.post("/v1/completions", json=BODY).status_code == 200
        assert admin.post(SCHEDULER, json={"tenants": shown["tenants"], "policy": "default"}).status_code == 200


def test_a_bad_key_file_is_one_line_at_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from headway.cli.main import main

    path = tmp_path / "keys.yaml"
    path.write_text("sk-alpha:\n  tenant: alpha\n  weight: none\n", encoding="utf-8")
    assert main(["serve", "--api-keys", str(path)]) == 1
    errors = capfd.readouterr().err
    assert "keys.yaml, line 3: weight: " in errors
    assert errors.count("\n") == 1
