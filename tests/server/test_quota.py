"""Quotas a minute on a clock that the test holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.request import Unattainable
from headway.engine.stream import GenerationError
from headway.server.errors import OverQuota
from headway.server.keys import Rates
from headway.server.quota import Bucket, Quota


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stream(choices: int = 1, prompt: int = 4) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[5] * prompt,
        choices=[SimpleNamespace(token_ids=[]) for _ in range(choices)],
        done=False,
        error=None,
    )


def test_requests_are_refused_until_there_is_room() -> None:
    clock = Clock()
    quota = Quota("alpha", Rates(requests=3), clock)
    for _ in range(3):
        quota.knock()
    clock.now += 5
    with pytest.raises(OverQuota) as refusal:
        quota.knock()
    assert refusal.value.status == 429
    assert refusal.value.retry_after == 15  # one every 20 s
    assert "3 requests per minute" in refusal.value.message
    assert "15 s" in refusal.value.message
    clock.now += 15
    quota.knock()
    clock.now += 3600
    for _ in range(3):  # it never holds more than a minute's
        quota.knock()
    with pytest.raises(OverQuota):
        quota.knock()


def test_tokens_count_as_they_are_generated() -> None:
    clock = Clock()
    quota = Quota("alpha", Rates(tokens=600), clock)
    quota.pay(100)
    one = stream(choices=2)
    quota.follow([one])
    one.choices[0].token_ids += range(300)
    one.choices[1].token_ids += range(150)
    quota.pay(50)
    with pytest.raises(OverQuota, match="600 tokens per minute; there is room again in 5 s"):
        quota.pay(50)
    one.choices[1].token_ids += range(100)  # a debt
    one.done = True
    clock.now += 5
    with pytest.raises(OverQuota, match="in 10 s"):
        quota.pay(50)
    clock.now += 10
    quota.pay(50)
    assert not quota._followed


def test_what_the_engine_refuses_is_given_back() -> None:
    quota = Quota("alpha", Rates(tokens=600), Clock())
    for _ in range(5):
        quota.pay(600)
        quota.give_back(600)


def test_what_the_engine_refuses_later_is_given_back_too() -> None:
    """It refuses a stream where its promise cannot be kept; the client gets 429 for the whole request."""
    quota = Quota("alpha", Rates(tokens=600), Clock())
    for _ in range(5):
        first, second = stream(prompt=200), stream(prompt=300)
        quota.pay(500)
        quota.follow([first, second])
        first.choices[0].token_ids += range(3)
        quota.headers()
        second.error, second.done = Unattainable("too late", 1.0), True
        first.done = True
        assert quota.headers()["x-ratelimit-remaining-tokens"] == "600"
        assert not quota._followed


def test_an_answer_that_fails_or_is_left_is_paid_for_as_far_as_it_came() -> None:
    quota = Quota("alpha", Rates(tokens=600), Clock())
    for error in (None, GenerationError("the step failed")):
        one = stream(prompt=100)
        quota.pay(100)
        quota.follow([one])
        one.choices[0].token_ids += range(50)
        one.done, one.error = True, error
    assert quota.headers()["x-ratelimit-remaining-tokens"] == "300"
    assert not quota._followed


def test_a_prompt_of_more_than_a_minute_goes_when_the_bucket_is_full() -> None:
    clock = Clock()
    quota = Quota("alpha", Rates(tokens=60), clock)
    quota.pay(180)
    with pytest.raises(OverQuota, match="in 121 s"):
        quota.pay(1)
    clock.now += 180
    quota.pay(180)


def test_headers_say_what_is_left() -> None:
    clock = Clock()
    quota = Quota("alpha", Rates(requests=60, tokens=600), clock)
    quota.knock()
    quota.pay(200)
    assert quota.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "400",
        "x-ratelimit-reset-tokens": "20.000s",
    }


@given(st.integers(1, 100), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60))
def test_over_any_time_no_more_than_the_rate_and_a_bucket(per_minute: int, asked: list[tuple[float, int]]) -> None:
    clock = Clock()
    bucket = Bucket(per_minute, clock)
    taken: list[tuple[float, int]] = []
    for pause, amount in asked:
        clock.now += pause
        if bucket.wait(amount) == 0:
            bucket.take(amount)
            taken.append((clock.now, amount))
    for first, (begin, _) in enumerate(taken):
        for last in range(first, len(taken)):
            used = sum(amount for _, amount in taken[first : last + 1])
            most = max(amount for _, amount in taken[first : last + 1])
            assert used <= per_minute + (taken[last][0] - begin) * per_minute / 60 + most + 1e-6
