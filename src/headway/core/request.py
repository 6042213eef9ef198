"""A request: the cold facts that never change while it is served."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class RequestError(ValueError):
    """A request that cannot be served as asked. `param` names the field at fault, `code` is machine readable."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class Unattainable(RequestError):
    """What a request was promised cannot be kept. `retry_after`: seconds that it would have waited, as predicted."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, code="slo_unattainable")
        self.retry_after = retry_after


class FinishReason(IntEnum):
    """Why a request ended. The names in lower case are what clients read."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4

    @property
    def label(self) -> str:
        return self.name.lower()


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if value > high or value < low or (open_low and value == low):
        raise RequestError(f"{name} must be in {'(' if open_low else '['}{low}, {high}], got {value}", param=name)


def _integer(name: str, value: int | None, low: int, high: int | None = None) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bound}, got {value}", param=name)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop; field names are vLLM's.

    `temperature` 0 is greedy. `max_tokens` None means up to `max_model_len`. `logprobs` None returns none, k returns
    the sampled token's and the k best. `seed` None lets the engine draw one; the tokens are a pure function of
    (seed, choice, position).

    Raises:
        RequestError: a value out of its range, naming the field.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, 128)
        _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _integer("logprobs", self.logprobs, 0, 20)
        _integer("seed", self.seed, -(2**63), 2**64 - 1)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError("stop must be non-empty strings", param="stop")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Slo:
    """What was promised, in seconds; infinity where nothing was."""

    ttft: float = math.inf
    tpot: float = math.inf
    deadline: float = math.inf
    """Seconds from arrival to the last token."""
    max_queue: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "deadline", "max_queue"):
            value = getattr(self, name)
            if math.isnan(value) or value <= 0:
                raise RequestError(f"{name} must be positive seconds, got {value}", param=name)

    def over(self, default: Slo) -> Slo:
        """This, and where it promises nothing, what `default` does."""
        if default == NO_SLO:
            return self
        names = ("ttft", "tpot", "deadline", "max_queue")
        return Slo(*(getattr(self if getattr(self, name) < math.inf else default, name) for name in names))


NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `n` choices are n requests that differ in `choice`.

    `handle` is the number that its tokens carry on the way back; it is unique among live requests. `stop_token_ids`
    are all the ids that end it (the model's eos included unless it is ignored). `arrival` is in seconds on the engine's
    clock. `tenant` and `request_class` name groups; lower `priority` is earlier.
    """

    id: str
    handle: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    arrival: float
    stop_token_ids: Sequence[int] = ()
    choice: int = 0
    priority: int = 0
    slo: Slo = field(default_factory=Slo)
    tenant: str = ""
    request_class: str = ""
    region: str = ""
    cache_salt: str = ""
    """Requests with different salts share no KV."""
