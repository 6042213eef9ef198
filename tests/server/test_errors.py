"""Bad input gets its documented error, and a stream that is under way meanwhile does not notice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL, Server, check, events
from tests.server.scripted import MAX_MODEL_LEN

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True, scope="module")
def other_streams(server: Server) -> Iterator[None]:
    """Somebody else's streams, one after the other all the time, which must go on unharmed."""
    stop, ended = threading.Event(), []

    def stream_on() -> None:
        body = {"prompt": "Somebody else's prompt. ", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                ended.append(events(client.post(COMPLETIONS, json=body)))

    thread = threading.Thread(target=stream_on)
    thread.start()
    yield
    stop.set()
    thread.join()
    texts = {"".join(chunk["choices"][0]["text"] for chunk in chunks) for chunks in ended}
    assert len(texts) == 1
    assert texts.pop().startswith("Somebody else's prompt. Somebody")
    assert all(chunks[-1]["choices"][0]["finish_reason"] == "length" for chunks in ended)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("max_completion_tokens", -5),
        ("max_completion_tokens", 10**6),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 10**30),
        ("min_p", 2),
        ("n", 0),
        ("n", 1000),
        ("seed", 2**70),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"5": 1000}),
        ("logit_bias", {"99999999": 1}),
        ("logit_bias", {str(i): 0 for i in range(2000)}),
        ("stop", [""]),
        ("stop", 5),
        ("stop", ["a"] * 100),
        ("stop", "a" * 5000),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("min_tokens", 20000),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("priority", 2**40),
        ("deadline_ms", 0),
        ("ttft_slo_ms", -1),
        ("tpot_slo_ms", "soon"),
        ("max_queue_ms", -0.5),
        ("request_class", "urgent"),
        ("request_id", "a" * 500),
        ("request_id", "a\nb"),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("user", 5),
        # What this server does not do.
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {"type": "object"}),
        ("allowed_token_ids", [1]),
        ("bad_words", ["x"]),
        ("prompt_logprobs", 0),
        ("use_beam_search", True),
        ("cache_salt", 5),
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_field(client: httpx.Client, path: str, field: str, value: Any) -> None:
    body = {"prompt": "Hello"} if path == COMPLETIONS else {"messages": MESSAGES}
    response = client.post(path, json=body | {field: value})
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    if field in ("max_tokens", "max_completion_tokens") and value in (
        10**6,
        10**30,
    ):  # the prompt and the answer together are too long
        assert error["code"] == "context_length_exceeded"
        return
    assert error["param"].startswith(field), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": ["a"] * 10_000}, "prompt"),
        ({"prompt": ["a"] * 1000, "n": 100}, "n"),
        ({"prompt": "a", "logprobs": 100}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "best_of": 5}, "best_of"),
        ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
def test_completion(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    check(client.post(COMPLETIONS, json=body), 400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [*MESSAGES, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"messages": MESSAGES, "functions": [{}]}, "functions"),
        ({"messages": MESSAGES, "modalities": ["audio"]}, "modalities"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": MESSAGES, "logprobs": 5}, "logprobs"),
        (
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_chat(client: httpx.Client, body: dict[str, Any], param: str) -> None:
    check(client.post(CHAT, json=body), 400, param)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ],
)
def test_tokenize(client: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    check(client.post(path, json=body), 400, param)


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"-Infinity"])
def test_number_that_json_does_not_have(client: httpx.Client, value: bytes) -> None:
    check(client.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": %b}' % value), 400, "temperature")


def test_number_that_is_too_large(client: httpx.Client) -> None:
    check(client.post(COMPLETIONS, content=b'{"prompt": "a", "temperature": 1e999}'), 400, "temperature")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"{",
        b'{"prompt": "a"',
        b'{"prompt": "a"} and more',
        b"[1, 2]",
        b'"prompt"',
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        rb'{"prompt": "\ud800"}',
        b"[" * 1_000_000,
        b'{"x": ' + b"[" * 1_000_000,
    ],
)
def test_broken_json(client: httpx.Client, body: bytes) -> None:
    check(client.post(COMPLETIONS, content=body), 400, None)


def test_unknown_model(client: httpx.Client) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES}), ("/tokenize", {"prompt": "a"})):
        check(client.post(path, json=body | {"model": "gpt-17"}), 404, "model", "model_not_found")
    check(client.get("/v1/models/gpt-17"), 404, "model", "model_not_found")


def test_prompt_that_is_too_long(client: httpx.Client) -> None:
    longer = "word " * MAX_MODEL_LEN
    code = "context_length_exceeded"
    check(client.post(COMPLETIONS, json={"prompt": longer}), 400, "prompt", code)
    check(client.post(COMPLETIONS, json={"prompt": [5] * MAX_MODEL_LEN}), 400, "prompt", code)
    check(client.post(COMPLETIONS, json={"prompt": longer * 1000}), 400, "prompt", code)
    check(client.post(CHAT, json={"messages": [{"role": "user", "content": longer}]}), 400, "messages", code)
    check(client.post(CHAT, json={"messages": MESSAGES * MAX_MODEL_LEN}), 400, "messages", code)
    check(client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": MAX_MODEL_LEN}), 400, "prompt", code)
    check(client.post("/detokenize", json={"tokens": [5] * 5000}), 400, "tokens", code)


def test_body_that_is_too_large(client: httpx.Client) -> None:
    body = json.dumps({"prompt": "a" * 30_000_000}).encode()
    check(client.post(COMPLETIONS, content=body), 413, None, "body_too_large")
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    check(client.post(COMPLETIONS, content=pieces), 413, None, "body_too_large")
    assert client.get("/health").status_code == 200


def test_body_that_is_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30000000\r\n\r\n{")
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_no_such_path_or_method(client: httpx.Client) -> None:
    check(client.get("/v1/nothing"), 404, None, "not_found")
    response = client.get(COMPLETIONS)
    check(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_same_request_id_twice_at_a_time(slow_server: Server) -> None:
    body = {"prompt": "a b c", "max_tokens": 500, "ignore_eos": True, "request_id": "mine"}
    with (
        httpx.Client(base_url=slow_server.url) as client,
        client.stream("POST", COMPLETIONS, json=body | {"stream": True}) as first,
    ):
        lines = first.iter_lines()
        assert '"id":"cmpl-mine"' in next(line for line in lines if line.startswith("data: "))
        check(client.post(COMPLETIONS, json=body), 400, "request_id")


def test_everything_at_its_default_is_accepted(client: httpx.Client) -> None:
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "structured_outputs": None,
        "bad_words": [],
        "best_of": 1,
        "suffix": "",
        "modalities": ["text"],
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low",
        "an_unknown_field": {"deep": [1, 2, {"er": None}]},
        "max_tokens": 2,
    }
    assert client.post(COMPLETIONS, json=nothing | {"prompt": "a"}).status_code == 200
    assert client.post(CHAT, json=nothing | {"messages": MESSAGES}).status_code == 200
    assert client.post(CHAT, json={"messages": MESSAGES, "tools": [{}], "tool_choice": "none"}).status_code == 200


def test_null_is_the_default_for_every_field(client: httpx.Client) -> None:
    import msgspec

    from headway.server.protocol import ChatRequest, CompletionRequest

    for path, kind, body in (
        (COMPLETIONS, CompletionRequest, {"prompt": "a b c"}),
        (CHAT, ChatRequest, {"messages": MESSAGES}),
    ):
        nulls = {field.name: None for field in msgspec.structs.fields(kind)} | body
        with_nulls, without = client.post(path, json=nulls).json(), client.post(path, json=body).json()
        assert with_nulls["choices"] == without["choices"]
        assert with_nulls["model"] == MODEL
