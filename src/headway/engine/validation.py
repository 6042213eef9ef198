"""What must hold before a request is sent to the engine. Shared by the asynchronous engine and `LLM`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from headway.core.request import RequestError, SamplingParams


class QueueFull(RequestError):
    """Too many requests wait. `retry_after`: seconds after which a place has probably come free."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take: token ids in [0, vocab_size), max_model_len tokens of prompt and output together."""

    vocab_size: int
    max_model_len: int


def check_request(
    prompt_token_ids: Sequence[int], params: SamplingParams, limits: Limits, param: str = "prompt"
) -> SamplingParams:
    """The params with `max_tokens` filled in. `param` names the field that the prompt came in ("prompt", "messages").

    Raises:
        RequestError: an empty prompt, an id that the model does not have, more tokens than the model can take.
    """
    _check_prompt(prompt_token_ids, limits.vocab_size, param)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", params.logit_bias, limits.vocab_size)
    prompt_len, room = len(prompt_token_ids), limits.max_model_len - len(prompt_token_ids)
    if room < 1:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your {param} resulted in "
            f"{prompt_len} tokens. Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )
    if params.max_tokens is None:
        return replace(params, max_tokens=room)
    if params.max_tokens > room:
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{prompt_len + params.max_tokens} tokens ({prompt_len} in the {param}, {params.max_tokens} in the "
            f"completion). Please reduce the length of the {param} or completion.",
            param=param,
            code="context_length_exceeded",
        )
    return params


def _check_prompt(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if not token_ids:
        raise RequestError(f"{param} must not be empty", param=param)
    _check_ids(param, token_ids, vocab_size)


def _check_ids(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids or ({*map(type, token_ids)} == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(i for i in token_ids if type(i) is not int or not 0 <= i < vocab_size)
    raise RequestError(f"{param} has token id {wrong!r}; this model's are 0 to {vocab_size - 1}", param=param)
