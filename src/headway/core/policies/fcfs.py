"""First come, first served."""

from __future__ import annotations

from headway.core.batch import Ints
from headway.core.table import Floats, Rows


class Fcfs:
    """By arrival. A preempted request keeps its place."""

    bounded = True

    def score(self, queue: Rows, now: float) -> Floats:
        arrival: Floats = queue.arrival
        return arrival

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        pass
