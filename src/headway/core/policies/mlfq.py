"""Multi-level feedback queue."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints
from headway.core.policies.base import Policy, reaching
from headway.core.table import Floats, Rows


class Mlfq(Policy):
    """Multi-level feedback queue: skip-join, doubling quanta, demotion by service. Not bounded: promotion is by time.

    Level l has a quantum of `quantum` * 2^l tokens. A request joins at the first level whose quantum holds its uncached
    prompt (skip-join: FastServe, Wu et al. 2023) and falls by one each time it has used a quantum up. One that has got
    nothing for `promote` seconds goes back to the top, for one quantum of it. First come, first served in a level.
    """

    def __init__(self, quantum: int = 128, promote: float = 10.0) -> None:
        self.quantum = quantum
        self.promote = promote
        self._start = np.zeros(256)
        self._last = np.zeros(256)
        self._boost = np.zeros(256)

    def level(self, queue: Rows, now: float) -> Floats:
        """float64[n], 0 is the top. From level e on, the quanta up to level l add up to quantum * (2^(l + 1) - 2^e)."""
        rows, served = queue.index, queue.served
        _, digits = np.frexp(served // self.quantum + self._start[rows])
        up = (served < self._boost[rows]) | (now - self._last[rows] > self.promote)
        return np.where(up, 0.0, digits - 1.0)

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = self.level(queue, now) * 1e9 + queue.arrival
        return result

    def arrived(self, rows: Rows, now: float) -> None:
        for name in ("_start", "_last", "_boost"):
            setattr(self, name, reaching(getattr(self, name), int(rows.index.max())))
        _, level = np.frexp((rows.work - 1) // self.quantum)
        self._start[rows.index], self._last[rows.index], self._boost[rows.index] = np.exp2(level), rows.arrival, 0.0

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        starved = now - self._last[rows.index] > self.promote
        if np.count_nonzero(starved):
            self._boost[rows.index[starved]] = rows.served[starved] + self.quantum
        self._last[rows.index] = now
