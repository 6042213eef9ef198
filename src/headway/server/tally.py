"""What the server counts: fed once a step and once a finished request, never once a token."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from headway.core.accounting import State
from headway.core.batch import Finished
from headway.core.request import FinishReason
from headway.engine.api import Choice, EngineStats
from headway.engine.router import StepTimes
from headway.server.errors import ApiError, OverQuota
from headway.server.promises import Promises, mean_token_time

_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_LENGTH = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

REJECTIONS = (
    "queue_full",
    "quota",
    "unauthorized",
    "forbidden",
    "slo_unattainable",
    "context_length_exceeded",
    "invalid_request",
    "unknown_model",
    "body_too_large",
    "unavailable",
)
SERVED_STATES = (State.PREFILL, State.DECODE)
"""What is not waiting."""


class Histogram:
    """Counts per bucket. `bounds`: upper bounds, inclusive; the last bucket, which has none, is implied."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def observe_all(self, values: Sequence[float]) -> None:
        for value, times in Counter(values).items():  # a step's tokens mostly come after the same gap
            self.observe(value, times)


class Tally:
    """Totals since the start; times in seconds, sizes in tokens."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.finished: Counter[FinishReason] = Counter()
        self.rejected: Counter[str] = Counter()
        self.state_times: Counter[str] = Counter()
        self.promises = Promises()
        self.step_tokens = Histogram(_STEP)
        self.first_token = Histogram(_FIRST_TOKEN)
        self.token_gap = Histogram(_TOKEN)
        self.token_mean = Histogram(_TOKEN)
        self.request = Histogram(_REQUEST)
        self.queue = Histogram(_REQUEST)
        self.inference = Histogram(_REQUEST)
        self.prefill = Histogram(_REQUEST)
        self.decode = Histogram(_REQUEST)
        self.prompt_length = Histogram(_LENGTH)
        self.output_length = Histogram(_LENGTH)
        self._steps = self._batched = 0

    def step(self, times: StepTimes) -> None:
        """An on_step hook."""
        self.generation_tokens += times.num_tokens
        self.first_token.observe_all(times.first)
        self.token_gap.observe_all(times.gaps)

    def snapshot(self, stats: EngineStats) -> None:
        """The steps since the last snapshot, each counted with the mean of their tokens."""
        steps, batched = stats.num_steps - self._steps, stats.num_batched_tokens - self._batched
        if steps > 0:
            self.step_tokens.observe(batched / steps, steps)
            self._steps, self._batched = stats.num_steps, stats.num_batched_tokens

    def reject(self, error: ApiError) -> None:
        """An answer that is an error."""
        self.rejected[_reason(error)] += 1

    def finish(self, end: Finished, choice: Choice) -> None:
        """An on_finished hook."""
        self.finished[end.reason] += 1
        self.state_times.update(end.state_times)
        served = sum(end.state_times.get(state.label, 0.0) for state in SERVED_STATES)
        total = end.finished - end.arrival
        self.request.observe(total)
        self.queue.observe(total - served)
        self.inference.observe(served)
        self.prefill.observe(end.state_times.get(State.PREFILL.label, 0.0))
        self.decode.observe(end.state_times.get(State.DECODE.label, 0.0))
        self.output_length.observe(end.output_len)
        self.prompt_length.observe(end.prompt_len)
        if end.output_len:
            self.prompt_tokens += end.prompt_len
            self.cached_tokens += end.cached_len
        if end.output_len > 1:
            self.token_mean.observe(mean_token_time(end))
        self.promises.settle(end, choice.stream)


def _reason(error: ApiError) -> str:
    if error.code in ("context_length_exceeded", "body_too_large", "slo_unattainable"):
        return error.code
    if isinstance(error, OverQuota):
        return "quota"
    return {401: "unauthorized", 403: "forbidden", 404: "unknown_model", 429: "queue_full"}.get(
        error.status, "unavailable" if error.status >= 500 else "invalid_request"
    )
