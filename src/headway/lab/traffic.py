"""Traffic: which requests come when. What paced runs, `headway compare` and the strategy benchmarks serve.

The same seed gives the same traffic on every machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from headway.core.request import Slo


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


def chat_and_documents(count: int, seed: int, *, documents: float = 0.1, scale: float = 1.0) -> list[Arrival]:
    """Short chat with long documents among it, all at time 0: the mix in which strategies differ.

    Chat: prompts of about 60 tokens, answers of about 80, priority 0, class "chat". Documents, the given share: prompts
    of about 600 tokens, answers of about 40, priority 1, class "document". Lengths are lognormal and bounded; `scale`
    multiplies them.
    """
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        if draw.random() < documents:
            prompt, output = _length(draw, 600, 0.35, 1500, scale), _length(draw, 40, 0.6, 160, scale)
            requests.append(Arrival(0.0, prompt, output, request_class="document", priority=1))
        else:
            prompt, output = _length(draw, 60, 0.7, 400, scale), _length(draw, 80, 0.8, 400, scale)
            requests.append(Arrival(0.0, prompt, output, request_class="chat"))
    return requests


def _length(draw: random.Random, median: float, sigma: float, most: int, scale: float) -> int:
    return max(1, round(scale * min(most, max(4.0, draw.lognormvariate(math.log(median), sigma)))))
