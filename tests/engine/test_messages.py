"""What goes through the wire comes out as it went in, at a fixed price per token."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headway.core.batch import Finished, Logprobs, StepEvents
from headway.core.request import FinishReason, Request, RequestError, SamplingParams, Slo, Unattainable
from headway.engine.messages import (
    Abort,
    Add,
    Ping,
    Refused,
    Shutdown,
    Step,
    command_decoder,
    encoder,
    event_decoder,
    handles_of,
    to_step,
    token_ids_of,
)

FINISHED = Finished(
    7, "a/1", FinishReason.LENGTH, None, 3, 5, 2, 1, 10.5, 11.0, 12.25, {"decode": 1.25, "prefill": 0.5}, "naïve"
)


def events(handles: list[int], tokens: list[int], **facts: object) -> StepEvents:
    return StepEvents(1, 2.0, np.array(handles, np.int64), np.array(tokens, np.int32), **facts)


def through(step: Step) -> Step:
    decoded = event_decoder.decode(encoder.encode(step))
    assert isinstance(decoded, Step)
    return decoded


def test_commands_arrive_in_order_and_whole() -> None:
    params = SamplingParams(
        n=3, max_tokens=None, seed=2**64 - 1, stop=["\n", "é"], stop_token_ids=[9], logit_bias={5: -1.5}, logprobs=0
    )
    request = Request(
        "id", 2**40, [0, 127, 128, 49151], params, 1.25, [2, 9], 2, -1, Slo(ttft=0.5), "tenant", "batch", "eu"
    )
    commands = [Add(request), Abort(2**40, FinishReason.STOP), Ping(3), Shutdown()]
    add, *others = command_decoder.decode(encoder.encode(commands))
    assert others == commands[1:]
    assert add.request == request
    assert math.isinf(add.request.slo.deadline)


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1)), max_size=70))
def test_handles_and_tokens_keep_their_values(pairs: list[tuple[int, int]]) -> None:
    handles, tokens = [h for h, _ in pairs], [t for _, t in pairs]
    step = through(to_step(events(handles, tokens)))
    assert handles_of(step) == handles
    assert token_ids_of(step) == tokens
    assert step.finished == []
    assert step.logprobs is None
    assert step.stats is None


def test_bytes_do_not_depend_on_the_machines_order() -> None:
    swapped = StepEvents(1, 2.0, np.array([1, 2], ">i8"), np.array([3, 4], ">i4"))
    assert to_step(swapped) == to_step(events([1, 2], [3, 4]))


def test_endings_and_logprobs_travel_with_the_tokens() -> None:
    logprobs = [None, Logprobs(-0.5, 2, [4, 5], [-0.25, -0.5])]
    step = through(to_step(events([7, 8], [1, 5], logprobs=logprobs, finished=[FINISHED])))
    assert step.logprobs == logprobs
    assert step.finished == [FINISHED]
    assert step.finished[0].reason is FinishReason.LENGTH


def test_a_token_costs_twelve_bytes() -> None:
    def size(rows: int) -> int:
        return len(encoder.encode(to_step(events([2**50] * rows, [2**30] * rows))))

    assert size(1024) - size(512) == 512 * 12


def test_a_refusal_comes_out_as_the_error_that_went_in():
    for error in (
        RequestError("too long", param="prompt", code="context_length_exceeded"),
        Unattainable("not within 2 s", 7.5),
    ):
        refused = event_decoder.decode(encoder.encode(Refused.of(3, error)))
        assert refused.handle == 3
        assert type(refused.error) is type(error)
        assert vars(refused.error) == vars(error)
