"""From tokens to what a reader sees: nothing lost, nothing split, nothing after a stop, however it reads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from headway.core.batch import Finished, Logprobs
from headway.core.request import FinishReason, RequestError, SamplingParams
from headway.engine.router import Router, StepTimes, Tags
from headway.engine.stream import Choice, Delta, EngineDead, GenerationError, Stream
from headway.engine.text import Tokenizer
from tests.texts import AWKWARD, sharegpt

LONG = 100_000


class Desk:
    """A router and its engine's part, played by hand."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.aborts: list[tuple[int, FinishReason]] = []
        self.router = Router(tokenizer, 2 * LONG, lambda handle, reason: self.aborts.append((handle, reason)))

    def open(self, prompt: str | list[int] = "Hello", request_id: str | None = None, **params: object) -> Stream:
        params.setdefault("max_tokens", LONG)
        stream = self.router.prepare(prompt, SamplingParams(**params), request_id=request_id)
        self.requests = self.router.open(stream, Tags())
        return stream

    def say(self, *pairs: tuple[Choice, int], ended: Sequence[Finished] = (), logprobs: list | None = None) -> None:
        self.router.deliver([c.handle for c, _ in pairs], [t for _, t in pairs], logprobs, ended)

    def say_all(self, stream: Stream, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self.say((stream.choices[0], token_id))

    def end(
        self,
        choice: Choice,
        reason: FinishReason = FinishReason.LENGTH,
        stop_token: int | None = None,
        message: str = "",
    ) -> Finished:
        return Finished(choice.handle, "", reason, stop_token, 1, 1, 3, 0, 0.0, 0.0, 0.0, {}, message)


@pytest.fixture
def desk(tokenizer: Tokenizer) -> Desk:
    return Desk(tokenizer)


def merge(deltas: Sequence[Delta]) -> tuple[str, list[int]]:
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids]


@pytest.mark.parametrize("text", [*AWKWARD, *sharegpt(5)])
def test_however_a_reader_takes_it_gets_the_whole(desk: Desk, text: str) -> None:
    token_ids = desk.tokenizer.encode(text) * 2
    whole = desk.tokenizer.decode(token_ids)
    for pace in (1, 2, 7, LONG):
        stream = desk.open()
        deltas = []
        for number, token_id in enumerate(token_ids, 1):
            desk.say((stream.choices[0], token_id))
            if number % pace == 0:
                deltas += stream.take()
        desk.say(ended=[desk.end(stream.choices[0])])
        deltas += stream.take()
        assert merge(deltas) == (whole, token_ids)
        assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert deltas[-1].completion_tokens == len(token_ids)
        assert all("\ufffd" not in d.text for d in deltas) or "\ufffd" in whole


def test_a_delta_waits_for_the_rest_of_a_character(desk: Desk) -> None:
    token_ids = desk.tokenizer.encode("👩‍🚀!")
    stream = desk.open()
    shown = []
    for token_id in token_ids:
        desk.say((stream.choices[0], token_id))
        shown += stream.take()
    assert len(shown) < len(token_ids)
    for delta in shown:
        assert delta.text == desk.tokenizer.decode(delta.token_ids)


def test_what_stays_half_a_character_ends_as_a_replacement(desk: Desk) -> None:
    token_ids = desk.tokenizer.encode("👩")[:-1]
    stream = desk.open()
    desk.say_all(stream, token_ids)
    assert stream.take() == []
    desk.say(ended=[desk.end(stream.choices[0])])
    assert merge(stream.take()) == (desk.tokenizer.decode(token_ids), token_ids)


def test_logprobs_keep_to_their_tokens(desk: Desk) -> None:
    stream, other = desk.open(logprobs=1), desk.open()
    for number, token_id in enumerate(desk.tokenizer.encode("naïve 👩‍🚀 café")):
        given = Logprobs(-float(number), 1, [token_id], [-1.0])
        desk.say((stream.choices[0], token_id), (other.choices[0], token_id), logprobs=[given, None])
    desk.say(ended=[desk.end(stream.choices[0]), desk.end(other.choices[0])])
    (delta,) = stream.take()
    assert delta.logprobs is not None
    assert [of.top_ids for of in delta.logprobs] == [[t] for t in delta.token_ids]
    assert [of.logprob for of in delta.logprobs] == [-float(n) for n in range(len(delta.token_ids))]
    assert other.take()[0].logprobs is None


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_choice(desk: Desk, include: bool) -> None:
    text = "One two three, four five. Six"
    stream = desk.open(stop=["e, fo", "Six"], include_stop_str_in_output=include)
    deltas = []
    for token_id in desk.tokenizer.encode(text):
        desk.say((stream.choices[0], token_id))
        deltas += stream.take()
    assert merge(deltas)[0] == ("One two three, fo" if include else "One two thre")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "e, fo")
    assert stream.done
    assert desk.aborts == [(stream.choices[0].handle, FinishReason.STOP)]
    desk.say(ended=[desk.end(stream.choices[0], FinishReason.STOP)])
    assert stream.take() == []
    assert desk.router.num_live == 0


def test_text_is_held_back_only_while_it_may_become_a_stop_string(desk: Desk) -> None:
    stream = desk.open(stop=["END"])
    shown = []
    for piece in (" a", " E", "N", "X", "E"):
        desk.say_all(stream, desk.tokenizer.encode(piece))
        shown.append(merge(stream.take())[0])
    assert shown == [" a", " ", "", "ENX", ""]
    desk.say(ended=[desk.end(stream.choices[0])])
    assert stream.take()[0].text == "E"


def test_stop_strings_count_from_min_tokens_on(desk: Desk) -> None:
    stream = desk.open(stop=["."], min_tokens=4)
    desk.say_all(stream, desk.tokenizer.encode(". . . . ."))
    (delta,) = stream.take()
    assert delta.text == ". . . "[: len(delta.text)]
    assert delta.finish_reason == "stop"
    assert len(delta.token_ids) >= 4


def test_the_eos_token_is_counted_but_not_shown(desk: Desk) -> None:
    eos = desk.tokenizer.eos_token_ids[0]
    stream = desk.open(skip_special_tokens=False)
    desk.say_all(stream, desk.tokenizer.encode("Bye"))
    desk.say((stream.choices[0], eos), ended=[desk.end(stream.choices[0], FinishReason.STOP, eos)])
    (delta,) = stream.take()
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("Bye", "stop", None)
    assert delta.token_ids[-1] == eos
    assert delta.cached_tokens == 3


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_named_and_shown_on_demand(desk: Desk, include: bool) -> None:
    bye, stop = desk.tokenizer.encode("Bye"), desk.tokenizer.encode("!")[0]
    stream = desk.open(stop_token_ids=[stop], include_stop_str_in_output=include)
    assert stop in desk.requests[0].stop_token_ids
    assert set(desk.tokenizer.eos_token_ids) <= set(desk.requests[0].stop_token_ids)
    desk.say_all(stream, bye)
    desk.say((stream.choices[0], stop), ended=[desk.end(stream.choices[0], FinishReason.STOP, stop)])
    (delta,) = stream.take()
    assert (delta.text, delta.stop_reason) == ("Bye!" if include else "Bye", stop)


def test_an_ignored_eos_does_not_end_the_request(desk: Desk) -> None:
    desk.open(ignore_eos=True)
    assert list(desk.requests[0].stop_token_ids) == []


def test_choices_share_a_stream_and_a_seed(desk: Desk) -> None:
    stream = desk.open(n=3, request_id="r")
    assert [(r.choice, r.params.seed) for r in desk.requests] == [(j, stream.seed) for j in range(3)]
    assert stream.seed is not None
    assert len({r.handle for r in desk.requests}) == len({r.id for r in desk.requests}) == 3
    a, b = desk.tokenizer.encode(" a")[0], desk.tokenizer.encode(" b")[0]
    first, second, third = stream.choices
    desk.say((third, b), (first, a))
    desk.say((first, a), ended=[desk.end(second)])
    assert {d.index: d.text for d in stream.take()} == {0: " a a", 1: "", 2: " b"}
    assert not stream.done
    desk.say(ended=[desk.end(first), desk.end(third)])
    assert stream.done


def test_seeds_are_drawn_anew_and_kept_when_given(desk: Desk) -> None:
    assert desk.open().seed != desk.open().seed
    assert desk.open(seed=5).seed == 5


def test_an_id_is_refused_while_it_is_served(desk: Desk) -> None:
    stream = desk.open(request_id="twin")
    with pytest.raises(RequestError, match="'twin' is being served"):
        desk.open(request_id="twin")
    desk.say(ended=[desk.end(stream.choices[0])])
    desk.open(request_id="twin")


def test_abort_ends_every_choice_once(desk: Desk) -> None:
    stream = desk.open("Hi", n=2)
    desk.say_all(stream, desk.tokenizer.encode("so far"))
    stream.abort()
    stream.abort()
    assert sorted(desk.aborts) == [(c.handle, FinishReason.ABORT) for c in stream.choices]
    desk.say_all(stream, desk.tokenizer.encode(" too late"))
    deltas = sorted(stream.take(), key=lambda d: d.index)
    assert [(d.text, d.finish_reason) for d in deltas] == [("so far", "abort"), ("", "abort")]


def test_a_failed_request_gives_what_it_had_and_then_says_why(desk: Desk) -> None:
    stream, other = desk.open(n=2), desk.open()
    desk.say_all(stream, desk.tokenizer.encode("so far"))
    desk.say(ended=[desk.end(stream.choices[0], FinishReason.ERROR, message="the step failed")])
    assert merge(stream.take())[0] == "so far"
    with pytest.raises(GenerationError, match="the step failed"):
        stream.take()
    assert desk.aborts == [(stream.choices[1].handle, FinishReason.ABORT)]
    assert not other.done


def test_a_refused_request_raises_what_the_engine_said(desk: Desk) -> None:
    stream = desk.open()
    desk.router.refuse(stream.choices[0].handle, RequestError("too big", param="max_tokens"))
    with pytest.raises(RequestError, match="too big"):
        stream.take()
    assert (desk.router.num_live, desk.router.streams, desk.aborts) == (0, {}, [])


async def test_a_dead_engine_reaches_every_reader(desk: Desk) -> None:
    streams = [desk.open() for _ in range(3)]
    desk.say_all(streams[0], desk.tokenizer.encode("so far"))
    readers = [asyncio.create_task(stream.collect()) for stream in streams[1:]]
    await asyncio.sleep(0)
    desk.router.fail_all(EngineDead("gone"))
    assert (await anext(streams[0])).text == "so far"
    with pytest.raises(EngineDead, match="gone"):
        await anext(streams[0])
    for reader in readers:
        with pytest.raises(EngineDead, match="gone"):
            await reader


async def test_iteration_yields_as_tokens_come_and_ends(desk: Desk) -> None:
    stream = desk.open()
    token_ids = desk.tokenizer.encode("one two three")

    async def talk() -> None:
        for token_id in token_ids:
            desk.say((stream.choices[0], token_id))
            await asyncio.sleep(0)
        desk.say(ended=[desk.end(stream.choices[0])])

    talking = asyncio.create_task(talk())
    deltas = [delta async for delta in stream]
    await talking
    assert merge(deltas) == ("one two three", token_ids)
    assert len(deltas) > 1
    assert [delta async for delta in stream] == []


async def test_collect_is_woken_once(desk: Desk) -> None:
    stream = desk.open(n=2)
    collecting = asyncio.create_task(stream.collect())
    await asyncio.sleep(0)
    waiter = stream._waiter
    for choice in stream.choices:
        for token_id in desk.tokenizer.encode("one two"):
            desk.say((choice, token_id))
            await asyncio.sleep(0)
    assert stream._waiter is waiter
    desk.say(ended=[desk.end(choice) for choice in reversed(stream.choices)])
    assert [(d.index, d.text, d.finish_reason) for d in await collecting] == [
        (0, "one two", "length"),
        (1, "one two", "length"),
    ]


async def test_cancelling_a_waiting_reader_aborts(desk: Desk) -> None:
    stream = desk.open()
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert desk.aborts == [(stream.choices[0].handle, FinishReason.ABORT)]


async def test_leaving_the_stream_aborts(desk: Desk) -> None:
    async with desk.open() as stream:
        pass
    assert [reason for _, reason in desk.aborts] == [FinishReason.ABORT]
    assert stream.done


def test_on_ready_calls_when_there_is_something_after_nothing(desk: Desk) -> None:
    stream, calls = desk.open(), []
    stream.on_ready = lambda: calls.append(len(desk.aborts))
    token_ids = desk.tokenizer.encode("one two three four")
    desk.say_all(stream, token_ids)
    assert len(calls) == 1
    assert merge(stream.take())[1] == token_ids
    desk.say_all(stream, token_ids[:1])
    assert len(calls) == 2
    desk.say(ended=[desk.end(stream.choices[0])])
    assert len(calls) == 3  # the end is always told


def test_hooks_get_one_call_a_step_and_one_an_end(desk: Desk) -> None:
    steps: list[StepTimes] = []
    ends: list[tuple[Finished, Choice]] = []
    desk.router.on_step.append(steps.append)
    desk.router.on_finished.append(lambda end, choice: ends.append((end, choice)))
    streams = [desk.open() for _ in range(3)]
    choices = [stream.choices[0] for stream in streams]
    word = desk.tokenizer.encode(" word")[0]
    desk.say((choices[0], word), (choices[1], word))
    desk.say((choices[0], word), (choices[1], word), (choices[2], word))
    last = desk.end(choices[1])
    desk.say(ended=[last])
    assert [(s.num_tokens, len(s.first), len(s.gaps)) for s in steps] == [(2, 2, 0), (3, 1, 2)]
    assert all(gap >= 0 for step in steps for gap in step.gaps)
    assert ends == [(last, choices[1])]
    assert choices[1].last_token - choices[1].first_token == pytest.approx(steps[1].gaps[1])


def test_one_readers_mistake_does_not_keep_others_waiting(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    first, second = desk.open(), desk.open()
    calls: list[str] = []
    first.on_ready = lambda: calls[7]
    second.on_ready = lambda: calls.append("second")
    desk.router.on_step += [lambda times: calls[9], lambda times: calls.append("step")]
    word = desk.tokenizer.encode(" word")[0]
    desk.say((first.choices[0], word), (second.choices[0], word))
    assert calls == ["second", "step"]
    assert caplog.text.count("IndexError") == 2


def test_random_steps_over_many_streams_keep_every_token(desk: Desk) -> None:
    draw = random.Random(0)
    streams = [desk.open(n=draw.choice([1, 2])) for _ in range(20)]
    choices = [choice for stream in streams for choice in stream.choices]
    sent: dict[int, list[int]] = {choice.handle: [] for choice in choices}
    got: dict[int, list[Delta]] = {choice.handle: [] for choice in choices}

    def read(stream: Stream) -> None:
        for delta in stream.take():
            got[stream.choices[delta.index].handle].append(delta)

    for _ in range(200):
        rows = draw.sample(choices, draw.randint(1, len(choices)))
        tokens = [draw.randrange(3, desk.tokenizer.vocab_size) for _ in rows]
        desk.say(*zip(rows, tokens, strict=True))
        for choice, token_id in zip(rows, tokens, strict=True):
            sent[choice.handle].append(token_id)
        for stream in draw.sample(streams, 5):
            read(stream)
    desk.say(ended=[desk.end(choice) for choice in choices])
    for stream in streams:
        read(stream)
    assert {h: merge(d) for h, d in got.items()} == {h: (desk.tokenizer.decode(t), t) for h, t in sent.items()}
