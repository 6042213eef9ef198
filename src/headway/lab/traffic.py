"""Traffic: which requests come when. What paced runs, `headway compare` and the strategy benchmarks serve.

The same seed gives the same traffic on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from headway.core.request import Slo
from headway.lab.workload import ordinary_ids


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come, `at` seconds after the start.

    `prompt`: token ids, or their number where nobody reads them (such prompts share no beginning). `output_len`: tokens
    until it ends by itself; `max_tokens` None asks for exactly so many, and then the scheduler knows the length.
    """

    at: float
    prompt: int | Sequence[int]
    output_len: int
    max_tokens: int | None = None
    request_class: str = ""
    tenant: str = ""
    priority: int = 0
    slo: Slo = field(default_factory=Slo)

    @property
    def prompt_len(self) -> int:
        return self.prompt if isinstance(self.prompt, int) else len(self.prompt)


def at_once(requests: Iterable[Arrival]) -> list[Arrival]:
    """All of them at time 0."""
    return [replace(request, at=0.0) for request in requests]


def poisson(requests: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The requests in their order, the gaps between them exponential with mean 1 / `rate` seconds."""
    return bursty(requests, rate, seed, burst=1.0)


def bursty(requests: Sequence[Arrival], rate: float, seed: int, burst: float = 8.0) -> list[Arrival]:
    """Poisson bursts of geometrically many requests, `burst` on average, that come at the same moment; `rate` requests
    per second in all.

    Raises:
        ValueError: the rate is not positive, or a burst smaller than one request.
    """
    if not rate > 0 or not burst >= 1:
        raise ValueError(f"rate must be above 0 and burst at least 1, got {rate} and {burst}")
    draw = random.Random(seed)
    now, timed = 0.0, []
    for request in requests:
        if not timed or draw.random() < 1 / burst:
            now += draw.expovariate(rate / burst) if math.isfinite(rate) else 0.0
        timed.append(replace(request, at=now))
    return timed


def with_tokens(requests: Iterable[Arrival], seed: int, vocab_size: int | None = None) -> list[Arrival]:
    """The requests with prompts of random token ids, for a real model."""
    draw = random.Random(seed)
    ids = ordinary_ids(vocab_size)
    return [
        replace(request, prompt=draw.choices(ids, k=request.prompt_len)) if isinstance(request.prompt, int) else request
        for request in requests
    ]


def chat_and_documents(count: int, seed: int, *, documents: float = 0.15, scale: float = 1.0) -> list[Arrival]:
    """Short chat with long documents among it, all at time 0: the mix in which strategies differ.

    Chat, class "realtime", priority 0: prompts of about 60 tokens, answers of about 60 and at most 200, promised
    within 20 s. Documents, class "batch", priority 1, the given share: prompts of about 600 tokens and at most 1000,
    answers of about 30 and at most 100, promised within 120 s. Lengths are lognormal; `scale` multiplies them. Two
    tenants: "big" sends three quarters, "small" the rest. Requests end before their max_tokens, as answers do: who
    decides the order does not know when.
    """
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        document = draw.random() < documents
        prompt, output, most = DOCUMENT if document else CHAT
        requests.append(
            Arrival(
                at=0.0,
                prompt=_length(draw, *prompt, scale),
                output_len=_length(draw, *output, scale),
                max_tokens=max(1, round(scale * most)),
                request_class="batch" if document else "realtime",
                tenant="big" if draw.random() < 0.75 else "small",
                priority=int(document),
                slo=Slo(deadline=120.0 if document else 20.0),
            )
        )
    return requests


CHAT = ((60, 0.7, 400), (60, 0.7, 200), 200)
DOCUMENT = ((600, 0.35, 1000), (30, 0.5, 100), 100)
"""Prompt and answer, each the median, the spread of its logarithm and the most tokens; and max_tokens."""


def _length(draw: random.Random, median: float, sigma: float, most: int, scale: float) -> int:
    return max(1, round(scale * min(most, max(4.0, draw.lognormvariate(math.log(median), sigma)))))
