"""The bytes of an answer: whole, or chunk by chunk. What endpoints differ in is in chat.py and completion.py.

The way of nearly every chunk (some text, nothing else) is two templates around a JSON string; only chunks that carry
more are put together as objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.core.request import FinishReason
from headway.engine.stream import Delta, Stream
from headway.server.wire import dump, dump_text, event

if TYPE_CHECKING:
    from headway.engine.text import Tokenizer

ABORTED = FinishReason.ABORT.label
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The same in all chunks of an answer. `created` in Unix seconds."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Wants:
    """What the client asked to see. `usage`: a last chunk with it; `continuous_usage`: in every chunk."""

    usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    logprobs: bool = False

    @property
    def only_text(self) -> bool:
        return not (self.continuous_usage or self.token_ids or self.logprobs)


class Usage:
    """Tokens read and written, over all prompts and choices."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._prompt_tokens = sum(len(stream.prompt_token_ids) for stream in streams)
        self._completion: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def count(self, position: int, index: int, delta: Delta) -> None:
        """The latest delta of choice `index` of the answer, which belongs to the prompt at `position`."""
        self._completion[index] = delta.completion_tokens
        self._cached[position] = max(self._cached.get(position, 0), delta.cached_tokens)

    def fields(self) -> dict[str, Any]:
        completion_tokens = sum(self._completion.values())
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self._prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class Answer(ABC):
    """One answer to `streams`, one a prompt; choice j of prompt i has the index i * n + j."""

    kind: str
    chunk_kind: str

    def __init__(self, identity: Identity, wants: Wants, streams: Sequence[Stream], tokenizer: Tokenizer) -> None:
        self.identity = identity
        self.wants = wants
        self.streams = streams
        self.tokenizer = tokenizer
        self.usage = Usage(streams)
        self.open_choices = sum(stream.params.n for stream in streams)
        """Choices that have not finished."""
        self.aborted = False
        """A choice was cut off; there is no finish_reason for that."""
        self._n = streams[0].params.n
        self._only_text = wants.only_text
        self._heads: dict[int, bytes] = {}
        self._tail = b""

    # -- chunks -------------------------------------------------------------------------------------------------------

    def chunk(self, position: int, delta: Delta) -> bytes:
        """Events for a delta of the prompt at `position`; none where it brings nothing new."""
        index = position * self._n + delta.index
        head = self._heads.get(index)
        if head is None:
            return self._opening(position, index) + self.chunk(position, delta)
        if delta.finish_reason is None and self._only_text:
            return head + dump_text(delta.text) + self._tail
        return self._full_chunk(position, index, delta)

    def _opening(self, position: int, index: int) -> bytes:
        head, self._tail = self._template(index)
        self._heads[index] = head
        return self.opening(position, index)

    def _full_chunk(self, position: int, index: int, delta: Delta) -> bytes:
        if delta.finish_reason == ABORTED:
            self.aborted = True
            return b""
        self.usage.count(position, index, delta)
        if delta.finish_reason is not None:
            self.open_choices -= 1
        choice = self.piece(index, delta.text, delta.finish_reason)
        if delta.logprobs:
            choice["logprobs"] = self.logprobs(index, delta)
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.wants.token_ids:
            choice["token_ids"] = delta.token_ids
        return self.event([choice])

    def event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One chunk. `more` are top-level fields."""
        return event(self._envelope(self.chunk_kind, choices) | self._usage_field() | more)

    def last_event(self) -> bytes:
        """The usage chunk, where it was asked for."""
        return self.event([], usage=self.usage.fields()) if self.wants.usage else b""

    def _usage_field(self) -> dict[str, Any]:
        if self.wants.continuous_usage:
            return {"usage": self.usage.fields()}
        return {"usage": None} if self.wants.usage else {}

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        who = self.identity
        return {"id": who.id, "object": kind, "created": who.created, "model": who.model, "choices": choices}

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the JSON string of a chunk's text."""
        mark = "\x00"  # its JSON form occurs nowhere else: ids and names hold no control characters
        head, tail = self.event([self.piece(index, mark, None)]).split(dump(mark))
        return head, tail

    # -- the whole ----------------------------------------------------------------------------------------------------

    def whole(self, results: Sequence[Sequence[Delta]]) -> bytes:
        """The answer in one piece. `results`: for each prompt, one delta a choice that holds all of it."""
        choices = []
        for position, deltas in enumerate(results):
            for delta in deltas:
                index = position * self._n + delta.index
                self.usage.count(position, index, delta)
                choices.append(self._choice(position, index, delta))
        body = self._envelope(self.kind, choices) | {"usage": self.usage.fields()}
        return dump(body | self.top_fields())

    def _choice(self, position: int, index: int, delta: Delta) -> dict[str, Any]:
        choice = self.full(position, index, delta)
        choice["logprobs"] = self.logprobs(index, delta) if delta.logprobs is not None else None
        choice["stop_reason"] = delta.stop_reason
        if self.wants.token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def top_fields(self) -> dict[str, Any]:
        """Further top-level fields of the whole answer."""
        return {}

    # -- what an endpoint decides -------------------------------------------------------------------------------------

    @abstractmethod
    def opening(self, position: int, index: int) -> bytes:
        """Events that precede a choice's first text."""

    @abstractmethod
    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A chunk's choice."""

    @abstractmethod
    def full(self, position: int, index: int, delta: Delta) -> dict[str, Any]:
        """The whole answer's choice."""

    @abstractmethod
    def logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        """The log probabilities of a delta's tokens."""
