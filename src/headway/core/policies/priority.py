"""By the priority that a request states."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints
from headway.core.policies.base import Policy
from headway.core.table import Floats, Rows


class Priority(Policy):
    """The request's own priority, lower first. Not bounded: a low one waits as long as higher ones come.

    It is a rank, too: where rows or tokens are short, low ones on board pause for high ones that arrive.
    """

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = queue.priority.astype(np.float64)
        return result

    def rank(self, rows: Rows) -> Ints | None:
        priority: Ints = rows.priority
        return priority
