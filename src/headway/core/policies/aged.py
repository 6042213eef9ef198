"""Aged: any policy, with bounded overtaking."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints
from headway.core.policies.base import Policy, reaching
from headway.core.table import Floats, Rows

OVERTAKING = 32_768
"""Tokens: 64 steps of 512."""
FIRST = -1e290


class Aged(Policy):
    """Another policy, but once `overtaking` tokens of later arrivals were served ahead of a request, it goes first.

    Requests are numbered as they come. The work of later arrivals that a request has seen served is the work of all
    higher numbers, since none of it was done before it came. That sum falls with the number, so those who have seen
    `overtaking` tokens or more are all numbers up to some `_due`, which only grows: one number instead of a sum for
    every request. They go before all others, in order of arrival.

    So the promise holds: where the sum has reached `overtaking`, nobody later is placed ahead any more. What can still
    be served is what was on board by then: steps that are launched, and the answers of those who hold a place.
    """

    bounded = True

    def __init__(self, policy: Policy, overtaking: int = OVERTAKING) -> None:
        if overtaking < 1:
            raise ValueError(f"overtaking must be at least 1 token, got {overtaking}")
        self.policy = policy
        self.drifts = policy.drifts
        self.overtaking = overtaking
        self._due = -1
        self._begun = False
        self._later = 0.0
        self._work = np.zeros(256)  # tokens served to each number, from _due + 1 on

    def score(self, queue: Rows, now: float) -> Floats:
        score = self.policy.score(queue, now)
        overdue = self._due + 1 - queue.seq
        late = overdue > 0
        if np.count_nonzero(late):
            score = np.where(late, FIRST * overdue, score)
        return score

    def rank(self, rows: Rows) -> Ints | None:
        rank = self.policy.rank(rows)
        return None if rank is None else np.where(rows.seq <= self._due, np.iinfo(np.int32).min, rank)

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        self.policy.served(rows, tokens, now)
        place = rows.seq - (self._due + 1)
        if len(place) and place[place.argmin()] < 0:
            counts = place >= 0
            place, tokens = place[counts], tokens[counts]
        self._work[place] += tokens
        self._later += float(np.add.reduce(tokens))
        if self._later - self._work[0] >= self.overtaking:
            self._advance()

    def _advance(self) -> None:
        """Lifts `_due` as far as the numbers above it have had `overtaking` tokens."""
        passed = np.cumsum(self._work)
        count = int(np.searchsorted(passed, self._later - self.overtaking, side="right"))
        self._later -= passed[count - 1]
        self._due += count
        self._work[:-count] = self._work[count:]
        self._work[-count:] = 0.0

    def arrived(self, rows: Rows, now: float) -> None:
        if not self._begun:  # it may follow another policy: numbers need not begin with 0
            self._due, self._begun = int(rows.seq.min()) - 1, True
        self._work = reaching(self._work, int(rows.seq.max()) - self._due)
        self.policy.arrived(rows, now)

    def ended(self, rows: Rows, now: float) -> None:
        self.policy.ended(rows, now)
