"""By deadline: the earliest, or the one that has the least time to spare."""

from __future__ import annotations

import numpy as np

from headway.core.load import Load
from headway.core.policies.base import Policy
from headway.core.step_time import StepTimeModel
from headway.core.table import Floats, Rows

NEVER = 1e12
"""Seconds: those without a deadline go behind all who have one, by arrival."""


def _deadline(queue: Rows) -> Floats:
    result: Floats = np.minimum(queue.deadline, NEVER + queue.arrival)
    return result


class Edf(Policy):
    """Earliest deadline first. Not bounded: one without a deadline waits as long as others have one."""

    drifts = True

    def score(self, queue: Rows, now: float) -> Floats:
        return _deadline(queue)


class LeastLaxity(Policy):
    """Least laxity first: deadline - now - predicted service. Not bounded: one without a deadline waits for all others.

    Service is remaining prefill and predicted decode at the seconds per token that the engine's own `step_time` model
    says of a typical step, or at `rates` (prefill, decode) until it is fitted.
    """

    drifts = True
    PREFILL = Load(tokens=512, attended=512 * 512, rows=1, kv_tokens=512)
    DECODE = Load(tokens=32, attended=32 * 512, rows=32, kv_tokens=32 * 512)

    def __init__(self, step_time: StepTimeModel | None = None, rates: tuple[float, float] = (1e-3, 3e-2)) -> None:
        self._step_time = step_time
        self._rates = rates

    def score(self, queue: Rows, now: float) -> Floats:
        prefill, decode = self._rates
        if self._step_time is not None and self._step_time.fitted:
            prefill = self._step_time.predict(self.PREFILL) / self.PREFILL.tokens
            decode = self._step_time.predict(self.DECODE)
        laxity = _deadline(queue)
        promised = (laxity < NEVER).nonzero()[0]
        if len(promised):
            rows = queue.among(promised)
            remaining = np.maximum(rows.predicted - (rows.length - rows.prompt_len), 1)
            laxity[promised] -= now + prefill * rows.work + decode * remaining
        return laxity
