"""The timeline of an answer accounts for all the time that its client has seen."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import Server, check, events, running

CLOCKS = 0.001
"""Seconds by which the wall clock that the client reads may be off: it is adjusted now and then."""


def timeline(server: Server, id: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/requests/{id}/timeline")
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def check_whole(choice: dict[str, Any]) -> None:
    """No gap, and the states sum to the whole."""
    spans = choice["timeline"]
    assert spans[0]["start"] == 0.0
    assert all(one["end"] == two["start"] for one, two in itertools.pairwise(spans))
    assert spans[-1]["end"] == pytest.approx(choice["seconds"], abs=1e-9)
    assert sum(choice["states"].values()) == pytest.approx(choice["seconds"], abs=1e-9)
    for state, seconds in choice["states"].items():
        assert seconds >= 0, state


def test_all_that_is_promised_of_a_finished_answer(server: Server) -> None:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 9, "ignore_eos": True}
    id = httpx.post(f"{server.url}/v1/completions", json=body).json()["id"]
    document = timeline(server, id)
    assert (document["id"], document["status"]) == (id, "finished")
    (choice,) = document["choices"]
    check_whole(choice)
    assert choice["seconds"] == document["seconds"]
    assert (choice["finish_reason"], choice["prompt_tokens"], choice["completion_tokens"]) == ("length", 4, 9)
    states = [span["state"] for span in choice["timeline"]]
    assert (states[0], states[-1]) == ("reading", "delivery")
    assert states[-3:-1] == ["prefill", "decode"]
    prefill, decode = choice["timeline"][-3:-1]
    assert (prefill["tokens"], decode["tokens"]) == (4, 8)
    assert decode["steps"][0] == prefill["steps"][1] + 1
    assert decode["steps"][1] - decode["steps"][0] == 7, "a token a step"


def test_every_choice_of_every_prompt_has_its_own(server: Server) -> None:
    body = {"prompt": [[5, 6], [7, 8, 9]], "n": 2, "max_tokens": 4, "ignore_eos": True}
    id = httpx.post(f"{server.url}/v1/completions", json=body).json()["id"]
    document = timeline(server, id)
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_tokens"] for choice in document["choices"]] == [2, 2, 3, 3]
    for choice in document["choices"]:
        check_whole(choice)
        assert choice["seconds"] == document["seconds"]


def test_an_answer_under_way_and_one_that_was_left(slow_server: Server) -> None:
    body = {"prompt": "On and on", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{slow_server.url}/v1/completions", json=body, timeout=30) as answer:
        lines = answer.iter_lines()
        id = httpx.Response(200, text=next(lines).removeprefix("data: ")).json()["id"]
        seen = timeline(slow_server, id)
        assert seen["status"] == "running"
        (choice,) = seen["choices"]
        check_whole(choice)
        assert choice["finish_reason"] is None
        assert choice["timeline"][-1]["state"] == "decode"
        for _ in range(6):
            next(lines)
        assert timeline(slow_server, id)["choices"][0]["states"]["decode"] > choice["states"]["decode"]
    slow_server.wait_until_idle()
    left = timeline(slow_server, id)
    assert left["status"] == "finished"
    check_whole(left["choices"][0])
    assert left["choices"][0]["finish_reason"] == "abort"


def test_a_stop_string_ends_an_answer_before_the_engine_hears_of_it(server: Server) -> None:
    body = {"prompt": "one two three", "max_tokens": 100, "ignore_eos": True, "stop": "two", "request_id": "stopped"}
    answer = httpx.post(f"{server.url}/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    document = timeline(server, answer["id"])
    check_whole(document["choices"][0])
    assert document["choices"][0]["seconds"] == document["seconds"]


def test_an_unknown_answer(server: Server) -> None:
    check(httpx.get(f"{server.url}/v1/requests/cmpl-nobody/timeline"), 404, "id")


def test_only_the_latest_are_remembered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.server import timelines

    monkeypatch.setattr(timelines, "KEPT", 3)
    book = timelines.Timelines()
    for i in range(5):
        book.close(book.open(f"a{i}", 0.0, []), 1.0)
    assert list(book._visits) == [("", "a2"), ("", "a3"), ("", "a4")]
    again = book.open("a2", 2.0, [])
    for i in range(5, 8):
        book.close(book.open(f"a{i}", 0.0, []), 1.0)
    assert book._visits["", "a2"] is again, "the id was taken again"


async def ask(client: httpx.AsyncClient, draw: random.Random) -> tuple[str, float, float, float]:
    """One random request: its id, the wall-clock times of sending and of the last byte, and the time of a request that
    does nothing, sent just before."""
    body = {
        "prompt": [draw.randrange(3, 200) for _ in range(draw.choice((1, 5, 60, 300)))],
        "max_tokens": draw.choice((1, 3, 20, 80)),
        "ignore_eos": True,
        "stream": draw.random() < 0.5,
        "request_class": draw.choice(("realtime", "batch")),
    }
    if draw.random() < 0.2:
        body |= {"prompt": "a few words " * draw.randrange(1, 30), "stop": "few", "n": draw.choice((1, 2))}
    begun = time.time()
    await client.get("/version")
    sent = time.time()
    answer = await client.post("/v1/completions", json=body)
    received = time.time()
    assert answer.status_code == 200, answer.text
    first = events(answer)[0] if body["stream"] else answer.json()
    return first["id"], sent, received, sent - begun


async def account(server: Server, count: int, users: int) -> list[float]:
    """What the states of `count` random requests lack of the time that the client saw, less what a request that does
    nothing takes; in seconds."""
    draw = random.Random(4)
    lacks, due = [], iter(range(count))

    async def user(client: httpx.AsyncClient) -> None:
        for _ in due:
            id, sent, received, nothing = await ask(client, draw)
            answer = await client.get(f"/v1/requests/{id}/timeline")
            document = answer.json()
            assert document["status"] == "finished"
            assert document["start"] >= sent - CLOCKS
            assert document["start"] + document["seconds"] <= received + CLOCKS
            for choice in document["choices"]:
                check_whole(choice)
                assert choice["seconds"] == document["seconds"]
            lacks.append(received - sent - document["seconds"] - nothing)

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        await asyncio.gather(*(user(client) for _ in range(users)))
    assert len(lacks) == count
    return lacks


async def test_the_states_of_random_requests_sum_to_what_the_client_saw(server: Server) -> None:
    lacks = await account(server, 200, users=4)
    assert statistics.median(lacks) < 0.002, "half of them within 2 ms: all where nobody else uses the machine"


@pytest.mark.slow
async def test_the_states_of_a_thousand_random_requests(tiny_model_dir: Path) -> None:
    with running(tiny_model_dir) as server:
        assert statistics.median(await account(server, 1000, users=4)) < 0.002
