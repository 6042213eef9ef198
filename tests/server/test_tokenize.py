"""/tokenize and /detokenize, and the little endpoints."""

from __future__ import annotations

import httpx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway
from headway.engine.text import Tokenizer
from tests.server.conftest import MODEL


def test_prompt(client: httpx.Client, words: Tokenizer) -> None:
    answer = client.post("/tokenize", json={"model": MODEL, "prompt": "Hello world", "return_token_strs": True}).json()
    ids = words.encode("Hello world")
    assert answer == {
        "count": len(ids),
        "max_model_len": 1024,
        "tokens": ids,
        "token_strs": [words.token(i) for i in ids],
    }


def test_messages(client: httpx.Client, words: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    for options in ({}, {"add_generation_prompt": False}):
        answer = client.post("/tokenize", json={"messages": messages, **options}).json()
        assert answer["tokens"] == words.encode(words.apply_chat_template(messages, **options))
        assert answer["token_strs"] is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_comes_back(client: httpx.Client, words: Tokenizer, text: str) -> None:
    """But for the few characters that this vocabulary has no bytes for."""
    tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert tokens == words.encode(text)
    shown = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert shown == words.decode(tokens, skip_special_tokens=False)
    assert shown == text or not text.isprintable()


def test_special_tokens_come_back(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"prompt": "a<|im_end|>"}).json()["tokens"]
    assert len(tokens) == 2
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "a<|im_end|>"}


def test_health_ping_version_load(client: httpx.Client) -> None:
    for path in ("/health", "/ping"):
        answer = client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert client.get("/version").json() == {"version": headway.__version__}
    assert client.get("/load").json()["server_load"] == 0


def test_documentation_names_every_endpoint(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/metrics", "/tokenize"} <= set(paths)
    schema = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["$ref"].endswith("CompletionRequest")
