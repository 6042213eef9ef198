"""Fair sharing between tenants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.policies.aged import OVERTAKING
from headway.core.policies.base import Policy
from headway.core.policies.shares import Shares
from headway.core.table import Floats, Phase, Rows

BETWEEN, WITHIN = 32.0, 4096.0
SLACK = 256.0
ROW = 2.0
"""A row on board counts as so many tokens more than it wants: the smaller, the more rows take turns on board."""


class Fair(Policy):
    """Equal service for every tenant, or by weight. Not bounded: a tenant's backlog waits for all other tenants' work.

    `weights`: tenant name to weight, 1 where not named. A tenant's requests go first come, first served. A row on board
    counts as what it wants of the next step, so that this is shared anew each time: where rows are short, those on
    board pause for tenants that have had less. Who is more than SLACK behind comes before all others. `credit`: see
    Shares.

    What is remembered of prompts is used where that costs little (locality-aware fair scheduling, Cao et al. 2025): of
    a tenant's waiting requests that no more than `within` tokens of its own are ahead of, those go first of whose
    prompts most is cached; and so do those of all tenants that are within `between` tokens, over the weight, of the
    one that is due. So nobody is passed over by more than that.
    """

    pauses = True

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        credit: float = OVERTAKING,
        between: float = BETWEEN,
        within: float = WITHIN,
    ) -> None:
        self.weights = dict(weights or {})
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"a tenant's weight must be positive, got {weight} for {tenant!r}")
        self.between = between
        self.within = within
        self.shares = Shares(credit)

    def score(self, queue: Rows, now: float) -> Floats:
        waits = queue.phase == int(Phase.WAITING)
        if waits.all():
            return self._line_of(queue)
        score = np.zeros(len(queue))
        board, waiting = queue.among(~waits), queue.among(waits)
        score[~waits], taken = self._board(board)
        score[waits] = self._line_of(waiting) + taken[waiting.tenant]
        return score

    def _board(self, rows: Rows) -> tuple[Floats, Floats]:
        """The scores float64[n] of rows on board, and by tenant what they take of the step, over the weight."""
        tenants, score = rows.tenant, np.zeros(len(rows))
        order = np.lexsort((rows.seq, tenants))
        score[order], taken = self.shares.line_up(tenants[order], rows.work[order].astype(np.float64) + ROW)
        return score, taken

    def _line_of(self, rows: Rows) -> Floats:
        """The scores float64[n] of rows that wait, as if nobody were on board."""
        tenants, cached = rows.tenant, rows.cached
        score = self.shares.score(rows.index, tenants)
        if np.count_nonzero(cached):
            near = (self.shares.lag(rows.index, tenants) <= self.within).nonzero()[0]
            _longest_first(score, near, cached[near], tenants[near])
            near = (score <= score.min() + self.between).nonzero()[0]
            _longest_first(score, near, cached[near], np.zeros(len(near), np.int32))
        return score

    def rank(self, rows: Rows) -> Ints | None:
        counter = self.shares.counter[rows.tenant]
        if not len(counter):
            return None
        later: Ints = (counter > counter.min() + SLACK).astype(np.int32)
        return later if np.count_nonzero(later) else None

    def counters(self) -> Floats:
        return self.shares.counter

    def arrived(self, rows: Rows, now: float) -> None:
        cost = rows.work + rows.predicted
        for i, request in enumerate(rows.requests):
            weight = self.weights.get(request.tenant, 1.0)
            self.shares.arrived(int(rows.index[i]), int(rows.tenant[i]), weight, float(cost[i]))

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        self.shares.served(rows.tenant, tokens)

    def ended(self, rows: Rows, now: float) -> None:
        for tenant in rows.tenant.tolist():
            self.shares.ended(tenant)


def _longest_first(score: Floats, rows: Longs, cached: Ints, groups: Ints) -> None:
    """Exchanges the scores of `rows` within their groups, so that the more is cached, the lower the score."""
    as_they_are = np.lexsort((score[rows], groups))
    as_wanted = np.lexsort((score[rows], -cached, groups))
    score[rows[as_wanted]] = score[rows[as_they_are]]
