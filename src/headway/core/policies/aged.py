"""Aged: any policy, with bounded overtaking."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.policies.base import Around, Policy, reaching
from headway.core.table import Floats, Rows

OVERTAKING = 32_768
"""Tokens: 64 steps of 512."""
FIRST = -1e290
MOST_ASIDE = 256
"""Steps."""


class Aged(Around):
    """Another policy, but once `overtaking` tokens of later arrivals were served ahead of a request, it goes first.

    Requests are numbered as they come. The work of later arrivals that a request has seen served is the work of all
    higher numbers, since none of it was done before it came. That sum falls with the number, so those who have seen
    `overtaking` tokens or more are all numbers up to some `_due`, which only grows: one number instead of a sum for
    every request. They go before all others, in order of arrival.

    So the promise holds: where the sum has reached `overtaking`, nobody later is placed ahead any more. What can still
    be served is what was on board by then: steps that are launched, and the answers of those who hold a place.

    What steps serve is only put aside until all of it together might lift `_due`.
    """

    bounded = True

    def __init__(self, policy: Policy, overtaking: int = OVERTAKING) -> None:
        if overtaking < 1:
            raise ValueError(f"overtaking must be at least 1 token, got {overtaking}")
        super().__init__(policy)
        self.bounded, self.overtaking = True, overtaking
        self._due = -1
        self._begun = False
        self._later = 0.0
        self._work = np.zeros(256)  # tokens served to each number, from _due + 1 on
        self._aside: list[tuple[Longs, Ints]] = []  # numbers and tokens of steps that are not counted yet
        self._until_due = float(overtaking)  # tokens that may be put aside

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
        self._aside.append((rows.seq, tokens))
        self._until_due -= float(np.add.reduce(tokens))
        if self._until_due <= 0 or len(self._aside) == MOST_ASIDE:
            self._count()

    def _count(self) -> None:
        """Counts what was put aside."""
        place = np.concatenate([seq for seq, _ in self._aside]) - (self._due + 1)
        tokens = np.concatenate([tokens for _, tokens in self._aside])
        self._aside.clear()
        counts = place >= 0
        self._work += np.bincount(place[counts], tokens[counts], len(self._work))
        self._later += float(tokens[counts].sum())
        if self._later - self._work[0] >= self.overtaking:
            self._advance()
        self._until_due = self.overtaking - (self._later - self._work[0])

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
