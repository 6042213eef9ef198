"""Whatever the text, it arrives: property tests of the JSON, the events and the answers around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.batch import Logprobs
from headway.core.request import SamplingParams
from headway.engine.stream import Delta, Stream
from headway.engine.text import Tokenizer
from headway.server.answer import Answer, Identity, Wants
from headway.server.chat import ChatAnswer
from headway.server.completion import CompletionAnswer
from headway.server.outbox import start
from headway.server.wire import dump, dump_text, event

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LINE_ENDS = st.text(st.sampled_from('a\n\r\t\v\f\x1c\x1d\x1e\x85\u2028\u2029\x00\x7f😀é"\\'))


@given(TEXT | LINE_ENDS)
def test_text_round_trips_and_no_client_finds_a_line_end_in_it(text: str) -> None:
    for data in (dump_text(text), dump(text)):
        assert json.loads(data) == text
        assert len(data.decode().splitlines()) == 1
        assert len(data.splitlines()) == 1


@given(st.dictionaries(TEXT, TEXT | st.integers() | st.none() | st.lists(LINE_ENDS)))
def test_event_holds_one_line_of_json(value: dict[str, Any]) -> None:
    data, *rest = event(value).decode().splitlines()
    assert rest == [""]
    assert json.loads(data.removeprefix("data: ")) == value


def deltas_of(texts: list[str], index: int) -> list[Delta]:
    """One token a text; the last ends the choice."""
    last = len(texts) - 1
    return [
        Delta(
            index=index,
            text=text,
            token_ids=[i],
            logprobs=None,
            finish_reason="stop" if i == last else None,
            stop_reason=None,
            prompt_tokens=3,
            completion_tokens=i + 1,
            cached_tokens=0,
        )
        for i, text in enumerate(texts)
    ]


def merged(deltas: list[Delta]) -> Delta:
    """All of a choice in one delta, as a stream's collect() returns it."""
    last = deltas[-1]
    text = "".join(delta.text for delta in deltas)
    return Delta(last.index, text, [], None, last.finish_reason, None, 3, last.completion_tokens, 0)


def make_answer(kind: type[Answer], wants: Wants, prompts: int, n: int, tokenizer: Tokenizer | None = None) -> Answer:
    streams = [Stream("id", None, [1, 2, 3], SamplingParams(n=n), 0.0, lambda _: None) for _ in range(prompts)]
    return kind(Identity("an-id", 7, "a model"), wants, streams, tokenizer)  # type: ignore[arg-type]


def read(data: bytes) -> list[dict[str, Any]]:
    *blocks, end = data.split(b"\n\n")
    assert end == b""
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


@given(
    choices=st.lists(st.lists(TEXT | LINE_ENDS, min_size=1, max_size=6), min_size=1, max_size=4),
    kind=st.sampled_from([ChatAnswer, CompletionAnswer]),
    wants=st.builds(Wants, usage=st.booleans(), continuous_usage=st.booleans(), token_ids=st.booleans()),
    data=st.data(),
)
def test_streamed_text_equals_the_whole_one(
    choices: list[list[str]], kind: type[Answer], wants: Wants, data: st.DataObject
) -> None:
    """In any order in which the tokens of the choices may come; chat streams one prompt, completions several."""
    prompts, n = (1, len(choices)) if kind is ChatAnswer else (len(choices), 1)
    pending = [deltas_of(texts, i % n) for i, texts in enumerate(choices)]
    results = [[merged(deltas) for deltas in pending]] if kind is ChatAnswer else [[merged(d)] for d in pending]
    streamed, whole = make_answer(kind, wants, prompts, n), make_answer(kind, wants, prompts, n)

    chunks = []
    while any(pending):
        which = data.draw(st.sampled_from([i for i, deltas in enumerate(pending) if deltas]))
        chunks += read(streamed.chunk(which // n, pending[which].pop(0)))
    assert streamed.open_choices == 0
    chunks += read(streamed.last_event())
    body = json.loads(whole.whole(results))

    texts, reasons = [""] * len(choices), [[] for _ in choices]
    for chunk in chunks:
        assert (chunk["id"], chunk["created"], chunk["model"]) == (body["id"], body["created"], body["model"])
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            reasons[choice["index"]].append(choice["finish_reason"])
    expected = [choice.get("text", choice.get("message", {}).get("content")) for choice in body["choices"]]
    assert texts == expected == ["".join(choice) for choice in choices]
    assert all(own.count("stop") == 1 and own[-1] == "stop" for own in reasons)
    if wants.usage:
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"] == body["usage"]


class Letters:
    """A tokenizer of which every token is a letter."""

    def token(self, token_id: int) -> str:
        return chr(97 + token_id)

    def token_bytes(self, token_id: int) -> bytes:
        return self.token(token_id).encode()


def test_probability_of_nothing_can_be_sent() -> None:
    """JSON has no minus infinity; clients expect OpenAI's stand-in."""
    delta = deltas_of(["a"], 0)[0]
    delta.logprobs = [Logprobs(float("-inf"), 5, [0, 1], [float("-inf"), -0.5])]
    answer = make_answer(ChatAnswer, Wants(logprobs=True), 1, 1, Letters())  # type: ignore[arg-type]
    entry = json.loads(answer.whole([[delta]]))["choices"][0]["logprobs"]["content"][0]
    assert entry["logprob"] == -9999.0
    assert [best["logprob"] for best in entry["top_logprobs"]] == [-9999.0, -0.5]


async def test_start_runs_a_coroutine_up_to_where_it_waits() -> None:
    steps: list[str] = []
    gate = asyncio.Event()

    async def work(*, waits: bool, fails: bool = False) -> None:
        steps.append("begun")
        if waits:
            await gate.wait()
            await asyncio.sleep(0)
        if fails:
            raise ValueError("as told")
        steps.append("ended")

    def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
        steps.clear()
        return start(work)

    assert begin(work(waits=False)) is None
    assert steps == ["begun", "ended"]

    task = begin(work(waits=True))
    assert task is not None
    assert steps == ["begun"]
    gate.set()
    await task
    assert steps == ["begun", "ended"]

    with pytest.raises(ValueError, match="as told"):
        begin(work(waits=False, fails=True))

    gate.clear()
    failing = begin(work(waits=True, fails=True))
    gate.set()
    assert failing is not None
    with pytest.raises(ValueError, match="as told"):
        await failing

    gate.clear()
    cancelled = begin(work(waits=True))
    assert cancelled is not None
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert steps == ["begun"]
