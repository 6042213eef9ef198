"""By the priority that a request states."""

from __future__ import annotations

import numpy as np

from headway.core.policies.base import Policy
from headway.core.table import Floats, Rows


class Priority(Policy):
    """The request's own priority, lower first. Not bounded: a low one waits as long as higher ones come."""

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = queue.priority.astype(np.float64)
        return result
