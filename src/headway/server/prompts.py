"""From what clients call a prompt (text, token ids, lists of both, messages) to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from headway.core.request import RequestError
from headway.server.params import template_options
from headway.server.protocol import ChatRequest, CompletionRequest, Message, TokenizeRequest

if TYPE_CHECKING:
    from headway.engine.text import Tokenizer

_LONG_TEXT = 2048
"""Characters from which on tokenising (which leaves the interpreter free) is worth a thread of its own."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is None where the client sent token ids."""

    token_ids: list[int]
    text: str | None

    def shown(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> str:
        """The prompt as it is echoed."""
        return self.text if self.text is not None else tokenizer.decode(self.token_ids, skip_special_tokens)


class PromptReader:
    """Makes prompts for one model. Long texts are tokenised on `workers`, so that streams go on meanwhile.

    A text that is too long whatever its tokens are is refused untokenised: no token of the model has more characters
    than its longest one.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, workers: Executor) -> None:
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._workers = workers
        longest = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))
        self._max_chars = max_model_len * max(longest, 1)

    async def completion(self, request: CompletionRequest, max_tokens: int | None, limit: int) -> list[Prompt]:
        """The prompts of a completion, in order.

        Raises:
            RequestError: an empty list, a mixed one, more than `limit`, one that is longer than the model can take.
        """
        given = _split(request.prompt)
        if len(given) > limit:
            raise RequestError(
                f"prompt holds {len(given)} prompts; at most {limit} can be served here.", param="prompt"
            )
        texts = [prompt if isinstance(prompt, str) else None for prompt in given]
        encoded = await self._encode(
            [text for text in texts if text is not None], "prompt", request.add_special_tokens is not False
        )
        token_ids = encoded if texts[0] is not None else cast("list[list[int]]", given)
        cut = self._cutter(request.truncate_prompt_tokens, max_tokens)
        return [Prompt(self._checked(cut(ids), "prompt"), text) for ids, text in zip(token_ids, texts, strict=True)]

    async def chat(self, request: ChatRequest, max_tokens: int | None) -> Prompt:
        """The messages through the chat template.

        Raises:
            RequestError: no messages, content that this server cannot read, a template that refuses them.
        """
        text = self.render(request, request.messages)
        token_ids = await self.encode(text, "messages", add_special_tokens=bool(request.add_special_tokens))
        cut = self._cutter(request.truncate_prompt_tokens, max_tokens)
        return Prompt(self._checked(cut(token_ids), "messages"), text)

    def render(self, request: ChatRequest | TokenizeRequest, messages: list[Message]) -> str:
        """The chat template's text for the messages."""
        if not messages:
            raise RequestError("messages must hold at least one message.", param="messages")
        if len(messages) > self._max_model_len:
            raise self._too_long(f"{len(messages)} messages", "messages")
        return self.tokenizer.apply_chat_template(
            [_plain(message, i) for i, message in enumerate(messages)], **template_options(request)
        )

    async def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text from the field `param`."""
        return (await self._encode([text], param, add_special_tokens))[0]

    async def _encode(self, texts: list[str], param: str, add_special_tokens: bool) -> list[list[int]]:
        lengths = list(map(len, texts))
        if max(lengths, default=0) > self._max_chars:
            raise self._too_long(f"{max(lengths)} characters", param)

        def encode() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(lengths) <= _LONG_TEXT:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._workers, encode)

    def _checked(self, token_ids: list[int], param: str) -> list[int]:
        """The engine checks each id, which is not worth it for a prompt that is too long anyway."""
        if len(token_ids) >= self._max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", param)
        return token_ids

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Raises RequestError for more ids than the model can take, or ids that it does not have."""
        if len(token_ids) > self._max_model_len:
            raise self._too_long(f"{len(token_ids)} tokens", param)
        vocab_size = self.tokenizer.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"{param} has token id {token_id}; this model's are 0 to {vocab_size - 1}", param=param
                )

    def _too_long(self, found: str, param: str) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self._max_model_len} tokens, answer included. However, your "
            f"{param} has {found}. Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )

    def _cutter(self, truncate: int | None, max_tokens: int | None) -> Callable[[list[int]], list[int]]:
        """Keeps the last `truncate` tokens of a prompt; -1 asks for as many as leave room for the answer."""
        if truncate is None:
            return lambda token_ids: token_ids
        keep = max(1, self._max_model_len - (max_tokens or 1)) if truncate == -1 else truncate
        if keep < 1:
            raise RequestError(
                f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {truncate}",
                param="truncate_prompt_tokens",
            )
        return lambda token_ids: token_ids[-keep:]


def _split(prompt: str | list[int | str | list[int]]) -> Sequence[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be an empty list.", param="prompt")
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise RequestError("prompt must not mix texts, token ids and lists of token ids.", param="prompt")
    if kinds == {int}:
        return [cast("list[int]", prompt)]
    return cast("Sequence[str | list[int]]", prompt)


def _plain(message: Message, position: int) -> dict[str, Any]:
    """A message as chat templates expect it: role and one text."""
    where = f"messages[{position}]"
    role = "system" if message.role == "developer" else message.role
    if role not in ("system", "user", "assistant"):
        raise RequestError(
            f"{where}.role must be system, developer, user or assistant, got {message.role!r}.", param=f"{where}.role"
        )
    for name in ("tool_calls", "function_call"):
        if getattr(message, name):
            raise RequestError(
                f"{where}.{name} is not supported by this server.", param=f"{where}.{name}", code="unsupported"
            )
    plain = {"role": role, "content": _text(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _text(message: Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise RequestError(f"{where}.content must be a string or a list of parts.", param=f"{where}.content")
    texts = []
    for i, part in enumerate(message.content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "refusal") or text is None:
            field = f"{where}.content[{i}]"
            raise RequestError(
                f"{field} must be a part of type text with a text, got type {part.type!r}; "
                "this model reads nothing else.",
                param=field,
                code="unsupported",
            )
        texts.append(text)
    return "\n".join(texts)
