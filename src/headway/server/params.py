"""From a request's body to what the engine is asked for; what this server cannot do is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.core.request import RequestError, SamplingParams, Slo
from headway.server.protocol import ChatRequest, CompletionRequest, Generate, TokenizeRequest

COMPLETION_MAX_TOKENS = 16
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_ENTRIES = 1024
"""Of logit_bias and stop_token_ids."""
MAX_REQUEST_ID = 128

_SAMPLING = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_UNSUPPORTED = (
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "prompt_logprobs",
    "use_beam_search",
    "suffix",
    "chat_template",
    "functions",
    "function_call",
    "audio",
)
_ASKS_NOTHING: dict[str, Callable[[Any], bool]] = {
    "response_format": lambda given: given.type == "text",
    "modalities": lambda given: given == ["text"],
    "tool_choice": lambda given: given in ("none", "auto"),
}


@dataclass(frozen=True, slots=True)
class Terms:
    """How a request is to be treated, apart from its tokens."""

    priority: int
    slo: Slo
    tenant: str
    request_class: str
    region: str
    cache_salt: str


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Raises RequestError for a field that asks for something that this server does not do."""
    tools = getattr(request, "tools", None)
    if tools and getattr(request, "tool_choice", None) != "none":
        raise _unsupported("tools")
    for name, asks_nothing in _ASKS_NOTHING.items():
        value = getattr(request, name, None)
        if value is not None and not asks_nothing(value):
            raise _unsupported(name)
    for name in _UNSUPPORTED:
        value = getattr(request, name, None)
        if value is not None and value is not False and value not in ([], {}, ""):
            raise _unsupported(name)


def _unsupported(name: str) -> RequestError:
    return RequestError(f"{name} is not supported by this server; leave it out.", param=name, code="unsupported")


def completion_params(request: CompletionRequest) -> SamplingParams:
    """Sampling of a completion.

    Raises:
        RequestError: a value out of its range or not supported, naming the field.
    """
    refuse_unsupported(request)
    n = request.n if request.n is not None else 1
    if request.best_of is not None and request.best_of != n:
        raise RequestError(
            f"best_of must equal n ({n}), got {request.best_of}; ranking more candidates is not supported.",
            param="best_of",
            code="unsupported",
        )
    if request.echo and request.logprobs is not None:
        raise RequestError(
            "echo with logprobs needs log probabilities of the prompt, which are not supported; leave one out.",
            param="echo",
            code="unsupported",
        )
    return _sampling(request, request.logprobs, COMPLETION_MAX_TOKENS)


def chat_params(request: ChatRequest) -> SamplingParams:
    """Sampling of a chat completion; `max_tokens` None goes on to the model's limit.

    Raises:
        RequestError: a value out of its range or not supported, naming the field.
    """
    refuse_unsupported(request)
    if request.top_logprobs is None:
        return _sampling(request, 0 if request.logprobs else None, None)
    if not request.logprobs and request.top_logprobs != 0:
        raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
    if not 0 <= request.top_logprobs <= 20:
        raise RequestError(f"top_logprobs must be between 0 and 20, got {request.top_logprobs}", param="top_logprobs")
    return _sampling(request, request.top_logprobs if request.logprobs else None, None)


def _sampling(request: Generate, logprobs: int | None, default_max_tokens: int | None) -> SamplingParams:
    _check_sizes(request)
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")
    given = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    asked = getattr(request, field)
    try:
        return SamplingParams(max_tokens=default_max_tokens if asked is None else asked, logprobs=logprobs, **given)
    except RequestError as error:
        if error.param == "max_tokens" and field != "max_tokens":
            raise RequestError(error.message.replace("max_tokens", field), param=field, code=error.code) from None
        raise


def _check_sizes(request: Generate) -> None:
    """What costs time at every token is bounded, so that one request cannot slow the others down."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop may hold at most {MAX_STOPS} strings, got {len(stops)}", param="stop")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise RequestError(f"a stop string may have at most {MAX_STOP_CHARS} characters, got {longest}", param="stop")
    for name in ("logit_bias", "stop_token_ids"):
        entries = len(getattr(request, name) or ())
        if entries > MAX_ENTRIES:
            raise RequestError(f"{name} may hold at most {MAX_ENTRIES} entries, got {entries}", param=name)


def terms(request: Generate) -> Terms:
    """Priority, promises and group of a request; milliseconds become seconds.

    Raises:
        RequestError: a promise that is not positive, or a priority that is not a 32-bit integer.
    """
    priority = request.priority or 0
    if not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must be a 32-bit integer, got {priority}", param="priority")
    slo = Slo(
        ttft=_seconds("ttft_slo_ms", request.ttft_slo_ms),
        tpot=_seconds("tpot_slo_ms", request.tpot_slo_ms),
        deadline=_seconds("deadline_ms", request.deadline_ms),
        max_queue=_seconds("max_queue_ms", request.max_queue_ms),
    )
    return Terms(
        priority, slo, request.user or "", request.request_class or "", request.region or "", request.cache_salt or ""
    )


def _seconds(name: str, milliseconds: float | None) -> float:
    if milliseconds is None:
        return math.inf
    if milliseconds <= 0:
        raise RequestError(f"{name} must be positive milliseconds, got {milliseconds}", param=name)
    return milliseconds / 1000


def template_options(request: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Keyword arguments for the chat template.

    Raises:
        RequestError: both a new answer and the continuation of the last one were asked for.
    """
    if request.add_generation_prompt and request.continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message contradict each other; set one of them.",
            param="continue_final_message",
        )
    options = dict(request.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in options:
            raise RequestError(
                f"chat_template_kwargs must not hold {name}; set it at the top level.", param="chat_template_kwargs"
            )
    continues = bool(request.continue_final_message)
    adds = not continues if request.add_generation_prompt is None else request.add_generation_prompt
    return options | {"add_generation_prompt": adds, "continue_final_message": continues}


def request_name(request: Generate) -> str | None:
    """The request id that the client gave.

    Raises:
        RequestError: it is too long to be a name, or not printable.
    """
    name = request.request_id
    if name and (len(name) > MAX_REQUEST_ID or not name.isprintable()):
        raise RequestError(
            f"request_id must be printable and have at most {MAX_REQUEST_ID} characters", param="request_id"
        )
    return name or None
