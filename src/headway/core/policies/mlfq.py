"""Multi-level feedback queue."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints, Longs
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
        self._start = np.zeros(256)  # 2^e, e being the level at which the row joined
        self._level = np.zeros(256)
        self._until = np.zeros(256)  # tokens served by which it leaves its level
        self._last = np.zeros(256)  # when it was last served

    def level(self, queue: Rows, now: float) -> Floats:
        """float64[n], 0 is the top."""
        level: Floats = self._level[queue.index]
        starved = self._last[queue.index] < now - self.promote
        if np.count_nonzero(starved):
            level[starved] = 0.0
        return level

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = self.level(queue, now) * 1e9 + queue.arrival
        return result

    def arrived(self, rows: Rows, now: float) -> None:
        for name in ("_start", "_level", "_until", "_last"):
            setattr(self, name, reaching(getattr(self, name), int(rows.index.max())))
        self._start[rows.index] = np.exp2(np.frexp((rows.work - 1) // self.quantum)[1])
        self._last[rows.index] = rows.arrival
        self._settle(rows.index, np.zeros(len(rows)))

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        served = rows.served
        index = rows.index
        starved = self._last[index] < now - self.promote
        if np.count_nonzero(starved):
            up = index[starved]
            self._level[up], self._until[up] = 0.0, served[starved] + self.quantum
        self._last[index] = now
        served += tokens
        used_up = served >= self._until[index]
        if np.count_nonzero(used_up):
            self._settle(index[used_up], served[used_up])

    def _settle(self, rows: Longs, served: Ints | Floats) -> None:
        """The level that service leads to: from e on, the quanta up to l add up to quantum * (2^(l + 1) - 2^e)."""
        start = self._start[rows]
        level = np.frexp(served // self.quantum + start)[1] - 1
        self._level[rows], self._until[rows] = level, self.quantum * (np.exp2(level + 1) - start)
