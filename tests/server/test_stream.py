"""The bytes of streams, clients that leave, clients that are slow."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from headway.engine.text import Tokenizer
from tests.server.conftest import MODEL, Server, events
from tests.server.scripted import NUM_BLOCKS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hello there"}]
ENDLESS = {"prompt": "On and on. ", "max_tokens": 900, "ignore_eos": True, "stream": True}


def ask(path: str, body: dict[str, Any]) -> bytes:
    """A request as bytes."""
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (path.encode(), len(data), data)


def test_bytes_of_a_completion(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "a b ", "max_tokens": 3, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    first, *_, last = blocks = response.text.split("\n\n")
    assert last == ""
    assert blocks[-2] == "data: [DONE]"
    chunk = json.loads(first.removeprefix("data: "))
    text = chunk["choices"][0].pop("text")
    assert text.startswith("a")  # a reader that comes late gets more at once
    assert chunk == {
        "id": chunk["id"],
        "object": "text_completion",
        "created": pytest.approx(time.time(), abs=60),
        "model": MODEL,
        "choices": [{"index": 0, "logprobs": None, "finish_reason": None}],
    }
    assert "\n" not in first


def test_finish_reason_is_null_until_the_last_chunk_and_comes_once(client: httpx.Client) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a b "}), (CHAT, {"messages": MESSAGES})):
        for n in (1, 3):
            chunks = events(client.post(path, json=body | {"max_tokens": 5, "n": n, "stream": True}))
            for index in range(n):
                reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
                assert reasons == [None] * (len(reasons) - 1) + ["length"]


def test_chat_chunks_are_of_one_kind(client: httpx.Client) -> None:
    chunks = events(client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 5, "stream": True}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["id"].startswith("chatcmpl-")
    assert all("usage" not in chunk for chunk in chunks)
    assert [chunk["choices"][0]["delta"].get("role") for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)


def test_usage_in_a_chunk_of_its_own_or_in_every_chunk(client: httpx.Client) -> None:
    body = {"prompt": "a b c ", "max_tokens": 4, "n": 2, "stream": True}
    *chunks, last = events(client.post(COMPLETIONS, json=body | {"stream_options": {"include_usage": True}}))
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(client.post(COMPLETIONS, json=body | {"stream_options": options}))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 8


def test_echo(client: httpx.Client, words: Tokenizer) -> None:
    body = {"prompt": "One two ", "max_tokens": 3, "echo": True}
    whole = client.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    assert whole == "One two One two "
    chunks = events(client.post(COMPLETIONS, json=body | {"stream": True, "n": 2}))
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts[0] == whole
    assert texts[1].startswith("One two  two")
    ids = client.post(COMPLETIONS, json=body | {"prompt": words.encode("One two ")}).json()["choices"][0]["text"]
    assert ids == whole


def test_token_ids_on_demand(client: httpx.Client, words: Tokenizer) -> None:
    ids = words.encode("One two ")
    body = {"prompt": "One two ", "max_tokens": 4, "return_token_ids": True}
    choice = client.post(COMPLETIONS, json=body).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == [ids[i % len(ids)] for i in range(4)]
    first, *rest = events(client.post(COMPLETIONS, json=body | {"stream": True}))
    assert first["choices"][0]["prompt_token_ids"] == ids
    assert [i for chunk in rest for i in chunk["choices"][0]["token_ids"]] == choice["token_ids"]

    body = {"messages": MESSAGES, "max_tokens": 4, "return_token_ids": True}
    whole = client.post(CHAT, json=body).json()
    assert whole["prompt_token_ids"] == words.encode(words.apply_chat_template(MESSAGES))
    first, *rest = events(client.post(CHAT, json=body | {"stream": True}))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [i for chunk in rest for i in chunk["choices"][0]["token_ids"]] == whole["choices"][0]["token_ids"]


def test_special_tokens_are_shown_on_demand(client: httpx.Client) -> None:
    body = {"prompt": "a<|im_end|>b", "max_tokens": 6, "ignore_eos": True}
    assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "abab"
    shown = client.post(COMPLETIONS, json=body | {"skip_special_tokens": False}).json()["choices"][0]["text"]
    assert shown == "a<|im_end|>ba<|im_end|>b"


def test_min_tokens_and_ignore_eos_give_exactly_as_many_tokens_as_asked_for(client: httpx.Client) -> None:
    body = {"prompt": "a<|im_end|>", "max_tokens": 37, "ignore_eos": True, "stop": None}
    assert client.post(COMPLETIONS, json=body).json()["usage"]["completion_tokens"] == 37
    chat = {"messages": [{"role": "user", "content": "x", "name": None}], "ignore_eos": True, "min_tokens": 37}
    answer = client.post(CHAT, json=chat | {"max_completion_tokens": 37}).json()
    assert answer["usage"]["completion_tokens"] == 37


def test_truncated_prompt(client: httpx.Client) -> None:
    body = {"prompt": "one two three four", "max_tokens": 2}
    answer = client.post(COMPLETIONS, json=body | {"truncate_prompt_tokens": 2}).json()
    assert answer["choices"][0]["text"] == " three four"
    assert answer["usage"]["prompt_tokens"] == 2
    longer = client.post(COMPLETIONS, json=body | {"prompt": "word " * 3000, "truncate_prompt_tokens": -1}).json()
    assert longer["usage"]["total_tokens"] == client.get(f"/v1/models/{MODEL}").json()["max_model_len"]


def test_content_in_parts_and_other_roles(client: httpx.Client, words: Tokenizer) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {
        "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}],
        "max_tokens": 1,
    }
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}]
    expected = len(words.encode(words.apply_chat_template(plain)))
    assert client.post(CHAT, json=body).json()["usage"]["prompt_tokens"] == expected


def test_final_message_is_continued(client: httpx.Client, words: Tokenizer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I was"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1}
    prompt = words.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.endswith("I was")
    assert client.post(CHAT, json=body).json()["usage"]["prompt_tokens"] == len(words.encode(prompt))


def test_silence_is_filled_with_comments(slow_server: Server) -> None:
    """Long prompts come first, so that the longest one waits for many steps."""
    long = {"prompt": [list(range(100 + i, 1000 + i)) for i in range(12)], "max_tokens": 2, "stream": True}
    with (
        httpx.Client(base_url=slow_server.url, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json=long) as ahead,
    ):
        lines = ahead.iter_lines()
        next(lines)
        text = client.post(COMPLETIONS, json={"prompt": list(range(50, 1000)), "max_tokens": 2, "stream": True}).text
    *blocks, end = text.split("\n\n")
    assert end == ""
    assert blocks[0] == ": ping"
    assert {block[:6] for block in blocks} == {": ping", "data: "}
    slow_server.wait_until_idle(5)


def test_client_that_leaves_ends_its_request(slow_server: Server) -> None:
    host, port = slow_server.url.removeprefix("http://").split(":")
    for path, body in (
        (COMPLETIONS, ENDLESS),
        (COMPLETIONS, ENDLESS | {"stream": False}),
        (CHAT, {"messages": MESSAGES, "ignore_eos": True, "n": 3}),
        (COMPLETIONS, ENDLESS | {"prompt": ["a", "b"], "n": 2}),
    ):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(ask(path, body))
            slow_server.wait_for(lambda load: load["server_load"] > 0)
        slow_server.wait_until_idle(3)


def test_hundred_clients_that_leave_in_mid_stream_return_every_block(slow_server: Server) -> None:
    host, port = slow_server.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(100)]
        for connection in connections:
            connection.sendall(ask(COMPLETIONS, ENDLESS))
        for connection in connections:
            received = b""
            while b"data: " not in received:
                received += connection.recv(65536)
        load = slow_server.wait_for(lambda load: load["num_requests_running"] == 100)
        assert load["kv_cache_usage"] >= 100 / NUM_BLOCKS
    slow_server.wait_until_idle(3)


def test_slow_reader_stalls_nobody_and_misses_nothing(server: Server, words: Tokenizer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect((host, int(port)))
        long = {"prompt": "0123456789 " * 4, "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True}
        connection.sendall(ask(COMPLETIONS, long | {"logprobs": 5}))
        time.sleep(0.2)
        began = time.monotonic()
        with httpx.Client(base_url=server.url, timeout=30) as client:
            answer = client.post(COMPLETIONS, json={"prompt": "quick ", "max_tokens": 50, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 50
        assert time.monotonic() - began < 10
        received = b""
        connection.settimeout(30)
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(65536)
    body = received.partition(b"\r\n\r\n")[2]
    texts = dict.fromkeys(range(8), "")
    for line in _dechunked(body).split(b"\n\n")[:-2]:
        choice = json.loads(line.removeprefix(b"data: "))["choices"][0]
        texts[choice["index"]] += choice["text"]
    ids = words.encode(long["prompt"])
    for index, text in texts.items():
        assert text == words.decode([ids[(i + index) % len(ids)] for i in range(900)])


def _dechunked(body: bytes) -> bytes:
    """The content of a chunked body."""
    content = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        content += rest[: int(size, 16)]
        body = rest[int(size, 16) + 2 :]
    return content


def test_only_requests_of_the_same_salt_share_computed_prompts(client: httpx.Client) -> None:
    def cached(salt: str | None) -> int:
        body = {"prompt": [7000 + i for i in range(64)], "max_tokens": 2, "cache_salt": salt}
        answer = client.post(COMPLETIONS, json=body).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("b")] == [0, 48, 0, 0, 48]
