"""Answers of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from headway.core.batch import Logprobs
from headway.engine.stream import Delta
from headway.server.answer import LOWEST_LOGPROB, Answer


class ChatAnswer(Answer):
    """`chat.completion` and its chunks; every choice begins with a chunk that names the role."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, position: int, index: int) -> bytes:
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self.event([first], **self.top_fields())

    def piece(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def full(self, position: int, index: int, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": index, "message": message, "finish_reason": delta.finish_reason}

    def top_fields(self) -> dict[str, Any]:
        return {"prompt_token_ids": self.streams[0].prompt_token_ids} if self.wants.token_ids else {}

    def logprobs(self, index: int, delta: Delta) -> dict[str, Any]:
        pairs = zip(delta.token_ids, delta.logprobs or (), strict=True)
        return {"content": [self._token(token_id, logprobs) for token_id, logprobs in pairs], "refusal": None}

    def _token(self, token_id: int, logprobs: Logprobs) -> dict[str, Any]:
        best = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return self._entry(token_id, logprobs.logprob) | {"top_logprobs": [self._entry(i, value) for i, value in best]}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.tokenizer.token(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(self.tokenizer.token_bytes(token_id)),
        }
