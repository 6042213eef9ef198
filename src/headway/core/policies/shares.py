"""Shares: virtual counters of the service that groups of requests have had."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.policies.base import reaching
from headway.core.table import Floats


class Shares:
    """A counter per group of the tokens served to it, divided by its weight (VTC, Sheng et al. 2024).

    A row's `score` adds to its group's counter the cost of what the group has ahead of it, so that one sort interleaves
    the groups. A group that comes back is lifted to the lowest counter of the active ones: idling earns no credit. With
    `credit`, in tokens over the weight, a group may be so far behind the first of the active ones, and is lifted when
    a request of it comes: what it has left to others lately it may catch up on. Groups are small numbers, rows the
    table's.
    """

    def __init__(self, credit: float = 0.0) -> None:
        self._credit = credit
        self.counter = np.zeros(16)
        self._share, self._live, self._tail = np.zeros(16), np.zeros(16), np.zeros(16)  # share: 1 / weight
        self._ahead = np.zeros(256)
        self._last_idle = 0.0

    def arrived(self, row: int, group: int, weight: float, cost: float) -> None:
        for name in ("counter", "_share", "_live", "_tail"):
            setattr(self, name, reaching(getattr(self, name), group))
        self._ahead = reaching(self._ahead, row)
        self._share[group] = 1.0 / weight
        if self._credit or not self._live[group]:
            self.counter[group] = max(self.counter[group], self._floor())
        self._live[group] += 1
        self._ahead[row] = self._tail[group]
        self._tail[group] += cost / weight

    def _floor(self) -> float:
        active = self.counter[self._live > 0]
        if not len(active):
            return self._last_idle - self._credit
        return float(active.max() - self._credit if self._credit else active.min())

    def served(self, groups: Ints, tokens: Ints) -> None:
        self.counter += np.bincount(groups, tokens, len(self.counter)) * self._share

    def ended(self, group: int) -> None:
        self._live[group] -= 1
        if not self._live.any():
            self._last_idle = self.counter[group]

    def lag(self, rows: Longs, groups: Ints) -> Floats:
        """float64[n]: the cost, over the weight, of those of the group that came between its first of `rows` and it."""
        ahead = self._ahead[rows]
        result: Floats = ahead - self._heads(ahead, groups)[groups]
        return result

    def _heads(self, ahead: Floats, groups: Ints) -> Floats:
        head = np.full(len(self.counter), np.inf)
        np.minimum.at(head, groups, ahead)
        return head

    def line_up(self, groups: Ints, sizes: Floats) -> tuple[Floats, Floats]:
        """For rows sorted by group, `sizes` float64[n] in tokens: float64[n], the group's counter and, over the weight,
        the sizes before it; and float64[k] of all groups, the sum of their sizes over the weight."""
        shares: Floats = sizes * self._share[groups]
        total: Floats = np.bincount(groups, shares, len(self.counter)).astype(np.float64)
        score: Floats = self.counter[groups] + np.cumsum(shares) - shares - (np.cumsum(total) - total)[groups]
        return score, total

    def score(self, rows: Longs, groups: Ints, behind: Floats | None = None) -> Floats:
        """float64[n]; within a group in order of arrival. `behind`, by group, is added to its members' scores."""
        ahead = self._ahead[rows]
        first = self.counter - self._heads(ahead, groups)
        if behind is not None:
            first[: len(behind)] += behind
        result: Floats = first[groups] + ahead
        return result
