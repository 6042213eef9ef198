"""First come, first served."""

from __future__ import annotations

from headway.core.policies.base import Policy
from headway.core.table import Floats, Rows


class Fcfs(Policy):
    """First come, first served: by arrival. A preempted request keeps its place."""

    bounded = True
    drifts = True

    def score(self, queue: Rows, now: float) -> Floats:
        arrival: Floats = queue.arrival
        return arrival
