"""Length clusters: requests of like lengths share a padded group, so that little of the rectangle is padding."""

from __future__ import annotations

import numpy as np

from headway.core.policies import Policy
from headway.core.policies.base import Around
from headway.core.table import Floats, Rows


class Clustered(Around):
    """Whoever is first by `policy`, and then those whose prompt and predicted output differ least from its own.

    No request is passed over for the sake of a group once it has waited `patience` seconds: all who have go before the
    others, in the order of `policy`.
    """

    def __init__(self, policy: Policy, patience: float) -> None:
        if not patience >= 0:
            raise ValueError(f"patience must be at least 0 seconds, got {patience}")
        super().__init__(policy)
        self.patience = patience
        self.bounded = self.drifts = False  # it is bounded by time; its scores are places

    def score(self, queue: Rows, now: float) -> Floats:
        """float64[n]: for those who have lost patience their place among each other, below 0; for the first of all the
        lowest; for the others how many tokens they differ from it."""
        count = len(queue)
        order = np.lexsort((queue.seq, self.policy.score(queue, now)))
        place = np.empty(count)
        place[order] = np.arange(-count, 0)
        impatient = queue.waited >= self.patience
        head = int(np.where(impatient, place - count, place).argmin()) if count else 0
        prompt, answer = queue.prompt_len, queue.predicted
        apart = np.abs(prompt - prompt[head : head + 1]) + np.abs(answer - answer[head : head + 1])
        score = np.where(impatient, place, apart.astype(np.float64))
        score[head : head + 1] = -count - 1.0
        return score
