"""A request that cannot be served is refused before it leaves, with the field at fault and both numbers."""

from __future__ import annotations

import pytest

from headway.core.request import RequestError, SamplingParams
from headway.engine.validation import Limits, check_request

LIMITS = Limits(vocab_size=100, max_model_len=10)


def refused(prompt: list[int], param: str = "prompt", **params: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        check_request(prompt, SamplingParams(**params), LIMITS, param)
    return caught.value


def test_no_max_tokens_means_all_the_room_there_is() -> None:
    assert check_request([1] * 4, SamplingParams(max_tokens=None), LIMITS).max_tokens == 6


def test_what_just_fits_is_left_alone() -> None:
    params = SamplingParams(max_tokens=6, stop_token_ids=[99], logit_bias={0: 1.0})
    assert check_request([99] * 4, params, LIMITS) is params


def test_an_empty_prompt() -> None:
    assert refused([], "messages").param == "messages"


@pytest.mark.parametrize("token_id", [-1, 100, 1.0, True, None, "1"])
def test_a_token_id_that_the_model_does_not_have(token_id: object) -> None:
    error = refused([1, token_id, 2])  # type: ignore[list-item]
    assert repr(token_id) in error.message
    assert "0 to 99" in error.message


def test_ids_in_params_are_checked_too() -> None:
    assert refused([1], stop_token_ids=[100]).param == "stop_token_ids"
    assert refused([1], logit_bias={100: 1.0}).param == "logit_bias"


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_a_prompt_that_leaves_no_room(max_tokens: int | None) -> None:
    error = refused([1] * 10, "messages", max_tokens=max_tokens)
    assert (error.code, error.param) == ("context_length_exceeded", "messages")
    assert error.message == (
        "This model's maximum context length is 10 tokens. However, your messages resulted in 10 tokens. "
        "Please reduce the length of the messages."
    )


def test_more_tokens_asked_for_than_there_is_room() -> None:
    error = refused([1] * 4, max_tokens=7)
    assert error.code == "context_length_exceeded"
    for number in ("10 tokens", "11 tokens", "4 in the prompt", "7 in the completion"):
        assert number in error.message


def test_min_tokens_that_the_room_cannot_hold() -> None:
    assert refused([1] * 4, max_tokens=None, min_tokens=7).param == "min_tokens"
