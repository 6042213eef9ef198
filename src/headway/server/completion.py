"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headway.engine.stream import Delta, Stream
from headway.server.answer import LOWEST_LOGPROB, Answer, Identity, Wants

if TYPE_CHECKING:
    from headway.engine.text import Detokenizer, Tokenizer


class _Measure:
    """Where tokens begin in a choice's text, in characters."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._chars = 0

    def begin(self, token_id: int) -> int:
        begin = self._chars
        self._chars += len(self._detokenizer.push(token_id))
        return begin


class CompletionAnswer(Answer):
    """`text_completion`, whole and in chunks. `echoes`: the prompts' texts where they are to precede their answers."""

    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(
        self,
        identity: Identity,
        wants: Wants,
        streams: Sequence[Stream],
        tokenizer: Tokenizer,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(identity, wants, streams, tokenizer)
        self._echoes = echoes
        self._measures: dict[int, _Measure] = {}

    def opening(self, position: int, index: int) -> bytes:
        if not self._echoes and not self.wants.token_ids:
            return b""
        return self.event([self.piece(index, self._echo(position), None) | self._prompt_ids(position)])

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def full(self, position: int, index: int, delta: Delta) -> dict[str, Any]:
        choice = self.piece(index, self._echo(position) + delta.text, delta.finish_reason)
        return choice | self._prompt_ids(position)

    def _echo(self, position: int) -> str:
        return self._echoes[position] if self._echoes else ""

    def _prompt_ids(self, position: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.streams[position].prompt_token_ids} if self.wants.token_ids else {}

    def logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        """Parallel lists over the tokens. `text_offset`: where in the choice's text each begins."""
        measure = self._measure(index)
        token = self.tokenizer.token
        names, values, best = [], [], []
        for token_id, logprobs in zip(delta.token_ids, delta.logprobs or (), strict=True):
            names.append(token(token_id))
            values.append(max(logprobs.logprob, LOWEST_LOGPROB))
            ranked = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            top = {token(i): max(value, LOWEST_LOGPROB) for i, value in ranked}
            best.append(top | {names[-1]: values[-1]})
        return {
            "text_offset": [measure.begin(token_id) for token_id in delta.token_ids],
            "token_logprobs": values,
            "tokens": names,
            "top_logprobs": best,
        }

    def _measure(self, index: int) -> _Measure:
        if index not in self._measures:
            stream = self.streams[index // self._n]
            self._measures[index] = _Measure(
                self.tokenizer.detokenizer(
                    stream.prompt_token_ids[-16:], skip_special_tokens=stream.params.skip_special_tokens
                )
            )
        return self._measures[index]
