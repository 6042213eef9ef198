"""By promise: what keeping it costs, and whether it can still be kept."""

from __future__ import annotations

import numpy as np

from headway.core.policies.base import Around, Policy, reaching
from headway.core.promise import Pace, costs, latest_start
from headway.core.step_time import StepTimeModel
from headway.core.table import Floats, Rows

BEHIND = 1e12
PATIENCE = 60.0
"""Seconds in which a request that was promised nothing is taken to be content with its first token."""


class ByPromise(Policy):
    """The promises easiest to keep first: least cost over the root of the time promised. Not bounded: others wait.

    Under overload the least cost first keeps the most promises, but few of long requests; the least cost over the time
    promised, which favours the patient, keeps those and few of short ones. This is half way. How long a request has
    waited does not count: if all go first when they can only just be kept, anything that happens breaks many. It
    belongs with an `admission` that relegates or refuses.
    """

    def __init__(self, step_time: StepTimeModel | None = None) -> None:
        self._step_time = step_time or StepTimeModel()
        self._haste = np.zeros(256)  # 1 / the root of the time promised, by row

    def score(self, queue: Rows, now: float) -> Floats:
        score: Floats = costs(queue, Pace.of(self._step_time)) * self._haste[queue.index]
        return score

    def arrived(self, rows: Rows, now: float) -> None:
        promised = np.minimum(np.minimum(rows.first_due, rows.deadline) - rows.arrival, PATIENCE)
        self._haste = reaching(self._haste, int(rows.index.max()))
        self._haste[rows.index] = 1.0 / np.sqrt(promised)


class Relegating(Around):
    """Another policy, but whose promise can no longer be kept goes behind all others, by arrival. Not bounded."""

    def __init__(self, policy: Policy, step_time: StepTimeModel | None = None) -> None:
        super().__init__(policy)
        self.bounded = False
        self._step_time = step_time or StepTimeModel()

    def score(self, queue: Rows, now: float) -> Floats:
        if not self._step_time.fitted:
            return self.policy.score(queue, now)
        late = latest_start(queue, Pace.of(self._step_time)) < now
        late |= queue.first_token > queue.first_due
        late |= queue.relegated > 0
        score = self.policy.score(queue, now)
        return np.where(late, BEHIND + queue.arrival, score) if np.count_nonzero(late) else score
