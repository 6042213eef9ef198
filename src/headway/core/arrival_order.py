"""Arrival order: who would have had a place by now if all had been admitted as they came."""

from __future__ import annotations

from collections import deque


class ArrivalOrder:
    """As many places as have been given would, in order of arrival, have gone to as many arrivals: whoever of these
    still waits was held back by the policy, which gave the place to one that came later.

    One number that only grows tells them apart, so that each request is looked at once. Who leaves the queue without a
    place, or passes another that does not fit, takes none from anybody.
    """

    def __init__(self) -> None:
        self._line: deque[tuple[int, int]] = deque()
        self._number: dict[int, int] = {}
        self._left: set[int] = set()
        self._next = 0

    def join(self, row: int) -> None:
        self._line.append((self._next, row))
        self._number[row] = self._next
        self._next += 1

    def leave(self, row: int) -> None:
        """It waits no longer, and took no place. Without effect on one that has had its first place."""
        number = self._number.pop(row, None)
        if number is not None and self._line and number >= self._line[0][0]:
            self._left.add(number)

    def take(self, row: int) -> bool:
        """It has its first place; False where it had one before."""
        return self._number.pop(row, None) is not None

    def advance(self) -> int | None:
        """One more place was given: the row that would have had it, if that still waits."""
        while self._line:
            number, row = self._line.popleft()
            if number in self._left:
                self._left.discard(number)
                continue
            return row if self._number.get(row) == number else None
        return None
