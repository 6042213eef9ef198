"""WaitWindow: how long a group that is not full is waited for."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Protocol

import numpy as np

from headway.core.table import Rows

CLASS_BOUNDS = {"realtime": (0.003, 0.005), "batch": (0.020, 0.050)}
"""Seconds, the shortest and the longest window of a request class."""


class WaitWindow(Protocol):
    """`closes(queue, size, now)`: when the window for `queue` (not empty, fewer than `size`) closes, in seconds on the
    engine's clock. It may close earlier than was said before, and later when others have come.

    It is told when each request came, and how long each group was on board.
    """

    def arrived(self, at: float) -> None: ...

    def ran(self, seconds: float) -> None: ...

    def closes(self, queue: Rows, size: int, now: float) -> float: ...


class FixedWindow:
    """Closes `length` seconds after the first waiting request came."""

    def __init__(self, length: float) -> None:
        self.length = length

    def arrived(self, at: float) -> None:
        pass

    def ran(self, seconds: float) -> None:
        pass

    def closes(self, queue: Rows, size: int, now: float) -> float:
        return float(queue.arrival.min()) + self.length


class AdaptiveWindow:
    """Waits as long as those who would come gain more than those who wait lose.

    Who misses a group waits until it ends, half the time that groups are on board on average: M seconds. Who waits for
    others loses the time until they come, each of n. So a moment more pays while n is less than the arrivals to expect
    in M, and stops to pay once nobody has come for M / n. The window closes then, or when nobody can be expected before
    its bound: closing early wins. The bound is twice the time to expect until the group is full, within the limits of
    the class of each who waits, counted from its arrival: shorter the more wait and the denser they come, longer when
    traffic is sparse.

    `longest`: the limit for a request of no class in CLASS_BOUNDS. Rates follow the last ARRIVALS arrivals and the
    last GROUPS groups, so a change has been taken up after so many.
    """

    ARRIVALS = 32
    GROUPS = 8

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self._gaps: deque[float] = deque(maxlen=self.ARRIVALS)
        self._durations: deque[float] = deque(maxlen=self.GROUPS)
        self._last = math.nan

    def arrived(self, at: float) -> None:
        if not math.isnan(self._last):
            self._gaps.append(max(0.0, at - self._last))
        self._last = at

    def ran(self, seconds: float) -> None:
        self._durations.append(seconds)

    @property
    def gap(self) -> float:
        """Seconds between arrivals, from their median, which the pause between bursts does not hide; infinite before
        the second. Of a Poisson process it is the mean."""
        return statistics.median(self._gaps) / math.log(2) if self._gaps else math.inf

    @property
    def missing(self) -> float:
        """Seconds that it costs to miss a group; infinite before the first has ended."""
        return statistics.fmean(self._durations) / 2 if self._durations else math.inf

    def closes(self, queue: Rows, size: int, now: float) -> float:
        waiting, gap, missing = len(queue), self.gap, self.missing
        bound = self._bound(queue, 2 * (size - waiting) * gap)
        if self._gaps and (now + gap > bound or waiting * gap >= missing):
            return now
        return min(bound, self._last + missing / waiting)

    def _bound(self, queue: Rows, filling: float) -> float:
        """`filling` seconds after the last arrival, within what the classes of the queue allow."""
        arrival, classes = queue.arrival, queue.request_class
        shortest, longest = np.zeros(len(queue)), np.full(len(queue), self.longest)
        for name, (low, high) in CLASS_BOUNDS.items():
            of_class = classes == queue.code(name)
            shortest[of_class], longest[of_class] = low, high
        length = np.clip(self._last + filling - arrival, shortest, longest)
        return float((arrival + length).min())
