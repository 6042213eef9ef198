"""The load generator against a scripted server whose delays, failures and short answers are known."""

from __future__ import annotations

import math
import re
import statistics

import pytest

from headway.lab.load import LoadError, LoadTest, Result, Target, first_model, poisson_arrivals
from headway.lab.workload import Item
from tests.lab.scripted import FIRST, GAP, ScriptedServer, serving

SLACK = 0.2  # a busy machine wakes late, never early


async def load(
    *prompts: str, output_len: int = 5, target: dict | None = None, **how
) -> tuple[list[Result], ScriptedServer]:
    server = ScriptedServer()
    async with serving(server) as url:
        items = [Item(prompt, output_len) for prompt in prompts]
        results = await LoadTest(Target(url, "scripted", **(target or {})), items, **how).run()
    return results, server


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_latencies_are_those_of_the_script(endpoint: str):
    (result,), _ = await load("ok", target={"endpoint": endpoint})
    assert result.ok
    assert (result.prompt_tokens, result.output_tokens, result.counted) == (11, 5, False)
    assert len(result.chunks) == 5  # neither the role nor the end is a token; a token without text is one
    assert FIRST <= result.ttft < FIRST + SLACK
    assert len(result.itl) == 4
    assert GAP <= statistics.median(result.itl) < GAP + SLACK
    assert 4 * GAP <= result.tpot * 4 < 4 * GAP + SLACK
    assert math.isclose(result.tpot, (result.e2e - result.ttft) / 4)


async def test_what_is_sent_is_what_was_asked_for():
    _, server = await load(
        "ok", target={"ignore_eos": True, "temperature": 0.5, "api_key": "secret", "extra": {"top_k": 3}}, output_len=2
    )
    assert server.bodies[0] == {
        "model": "scripted",
        "prompt": "ok",
        "max_tokens": 2,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 3,
    }
    assert server.headers[0]["Authorization"] == "Bearer secret"


def test_token_ids_and_messages_go_as_they_are():
    target = Target("http://127.0.0.1:1/v1/", "m")
    assert target.url() == "http://127.0.0.1:1/v1/completions"
    assert target.body(Item([5, 6], 1))["prompt"] == [5, 6]
    messages = [{"role": "system", "content": "s"}]
    assert Target("http://h", "m", "chat").body(Item(messages, 1))["messages"] == messages


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("refuse", "429 the queue is full"),
        ("error", "the engine stopped"),
        ("break", "Client|the stream ended"),
        ("empty", "the answer was empty"),
        ("garbage", "not understood"),
        ("hang", "no end within 2 s"),
    ],
)
async def test_a_failure_is_a_result_that_says_why(script: str, error: str):
    results, _ = await load("ok", script, "ok", concurrency=3, timeout=2.0)
    assert [result.ok for result in results] == [True, False, True]
    assert re.search(error, results[1].error)


async def test_a_short_answer_is_seen():
    results, _ = await load("short", "ok", concurrency=2, output_len=6)
    assert [result.short for result in results] == [True, False]
    assert results[0].output_tokens == 3


async def test_without_usage_chunks_are_counted():
    (result,), _ = await load("no usage", output_len=3)
    assert (result.output_tokens, result.counted, result.prompt_tokens) == (3, True, None)


async def test_a_closed_loop_keeps_its_users_busy_and_no_more():
    seen: list[Result] = []
    results, server = await load(*["ok"] * 9, concurrency=3, output_len=2, watch=seen.append)
    assert server.most == 3
    assert len(seen) == len(results) == 9
    assert all(result.sent - result.due < SLACK for result in results)
    # Three rounds: the last starts when the second has ended.
    assert results[-1].due >= 2 * (FIRST + GAP)


async def test_an_open_loop_counts_from_when_a_request_was_due():
    results, server = await load(*["ok"] * 4, rate=math.inf, concurrency=1, output_len=2)
    assert server.most == 1
    assert [result.due for result in results] == [0.0] * 4
    ordered = sorted(results, key=lambda result: result.sent)
    for place, result in enumerate(ordered):
        # Each waited in this client for the ones before it.
        assert result.ttft >= place * (FIRST + GAP) + FIRST


async def test_an_open_loop_does_not_wait_for_answers():
    results, server = await load(*["ok"] * 20, rate=200.0, seed=5, output_len=4)
    assert server.most > 3
    assert [result.due for result in results] == poisson_arrivals(20, 200.0, 5)
    assert all(0 <= result.sent - result.due < SLACK for result in results)


def test_arrivals_are_poisson():
    rate, count = 8.0, 20_000
    arrivals = poisson_arrivals(count, rate, seed=11)
    gaps = [later - earlier for earlier, later in zip([0.0, *arrivals], arrivals, strict=False)]
    assert min(gaps) >= 0
    # Five standard errors of the mean, the standard deviation, and the share of gaps above the mean.
    assert abs(statistics.mean(gaps) * rate - 1) < 5 / math.sqrt(count)
    assert abs(statistics.stdev(gaps) * rate - 1) < 5 * math.sqrt(2 / count)
    assert abs(sum(gap > 1 / rate for gap in gaps) / count - math.exp(-1)) < 5 * 0.5 / math.sqrt(count)
    # Arrivals in disjoint seconds are as variable as they are many.
    seconds = int(arrivals[-1])
    counts = [0] * (seconds + 1)
    for arrival in arrivals:
        counts[int(arrival)] += 1
    assert abs(statistics.variance(counts[:seconds]) / rate - 1) < 5 * math.sqrt(2 / seconds) * 1.1
    assert poisson_arrivals(count, rate, seed=11) == arrivals
    assert poisson_arrivals(3, math.inf, seed=1) == [0.0, 0.0, 0.0]


async def test_the_first_model_is_found():
    async with serving(ScriptedServer()) as url:
        assert await first_model(url) == "scripted"
        assert await first_model(url + "/v1/") == "scripted"
        with pytest.raises(LoadError, match="answered 404"):
            await first_model(url + "/elsewhere")


async def test_no_server_is_one_clear_line():
    with pytest.raises(LoadError, match=r"no server answers at http://127\.0\.0\.1:9 .*headway serve"):
        await first_model("http://127.0.0.1:9")
