"""What was computed for each tenant, and how fairly: Jain's index over those who wanted more than they got."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

from headway.core.batch import Longs
from headway.core.policies.base import reaching
from headway.core.table import Floats, Phase, RequestTable

WINDOW, EVERY = 30.0, 1.0
"""Seconds: what the index looks back on, and the least between two samples of it."""


class TenantService:
    """Tokens computed by tenant, kept without work in a step: rows know their own, ended ones are added up."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._ended = np.zeros(16)
        self._samples: deque[tuple[float, Floats, set[int]]] = deque()

    def ended(self, row: int) -> None:
        """A row has ended."""
        table = self._table
        tenant = int(table.tenant[row])
        self._ended = reaching(self._ended, tenant)
        self._ended[tenant] += int(table.computed[row]) + int(table.carried[row])

    def totals(self) -> Floats:
        """float64[k] by tenant's code, in tokens: recomputed ones count, cached ones do not."""
        table = self._table
        live = ((table.phase != Phase.FREE) & (table.phase != Phase.ENDED)).nonzero()[0]
        counts = np.bincount(table.tenant[live], table.computed[live] + table.carried[live], len(self._ended))
        tokens: Floats = counts.astype(np.float64)  # of nobody it counts in integers
        tokens[: len(self._ended)] += self._ended
        return tokens

    def of(self, names: Mapping[str, object]) -> dict[str, int]:
        """Of these tenants."""
        return {name: int(tokens) for name, tokens in self.named(self.totals(), names).items()}

    def named(self, values: Floats, names: Mapping[str, object]) -> dict[str, float]:
        """Of `values` float64[k] by tenant's code, those of these tenants; 0 of whom nothing is known."""
        codes = {name: self._table.code(name) for name in names}
        return {name: float(values[code]) if code < len(values) else 0.0 for name, code in codes.items()}

    def sample(self, queue: Longs, now: float) -> None:
        """To be called now and then. `queue`: the rows that wait."""
        samples = self._samples
        if samples and now - samples[-1][0] < EVERY:
            return
        samples.append((now, self.totals(), set(self._table.tenant[queue].tolist())))
        while now - samples[1 if len(samples) > 1 else 0][0] > WINDOW:
            samples.popleft()

    def index(self, weights: Mapping[str, float], now: float) -> float:
        """Jain's index (Jain, Chiu and Hawe 1984) of service over weight in the last 30 s, over the tenants that had
        requests in the queue all the time: 1 is fair, 1/n means that one of n got everything. nan where fewer than two
        had."""
        if len(self._samples) < 2 or now - self._samples[-1][0] > WINDOW:
            return math.nan
        wanting = sorted(set.intersection(*(wanting for _, _, wanting in self._samples)))
        if len(wanting) < 2:
            return math.nan
        (_, first, _), (_, last, _) = self._samples[0], self._samples[-1]
        weight = {self._table.code(name): value for name, value in weights.items()}
        before = np.zeros(len(last))
        before[: len(first)] = first
        shares = [(last[code] - before[code]) / weight.get(code, 1.0) for code in wanting]
        return jain(shares)


def jain(shares: list[float]) -> float:
    """(sum x)^2 / (n sum x^2); nan where nobody got anything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else math.nan
