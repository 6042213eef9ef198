"""Realtime and batch requests."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Bools, Ints
from headway.core.policies.base import Policy, reaching
from headway.core.policies.shares import Shares
from headway.core.table import RUNNING, Floats, Rows

REALTIME, BATCH = 0, 1
BEHIND = 1e12
"""Tokens: more than any share differs."""


class Classes(Policy):
    """Realtime before batch, which has its turn every tenth step, by weight 4 : 1. Not bounded: realtime overtakes.

    Requests of class "batch" form one queue, all others the realtime one; each is first come, first served. Requests on
    board go first. On every `cadences[0]`-th step waiting realtime requests are placed among them rather than behind,
    and on every `cadences[1]`-th waiting batch requests among the realtime ones; those of the same place go by the
    service that their class has had, divided by its weight. So while realtime requests wait, a batch one is admitted
    only on its class's turn, and then only where the class has had less than its share.
    """

    def __init__(self, weights: tuple[float, float] = (4.0, 1.0), cadences: tuple[int, int] = (3, 10)) -> None:
        if min(weights) <= 0 or min(cadences) < 1:
            raise ValueError(f"weights must be positive and cadences at least 1, got {weights} and {cadences}")
        self.weights = weights
        self.cadences = cadences
        self.shares = Shares()
        self._class: Ints = np.zeros(256, np.int32)

    def score(self, queue: Rows, now: float) -> Floats:
        rows = queue.index
        group = self._class[rows]
        realtime = 0.0 if queue.step % self.cadences[0] == 0 else 1.0
        batch = realtime if queue.step % self.cadences[1] == 0 else 2.0
        score = self.shares.score(rows, group, np.array([realtime, batch]) * BEHIND)
        on_board = queue.phase == RUNNING
        if np.count_nonzero(on_board):
            score[on_board] = self.shares.score(rows[on_board], group[on_board])
        return score

    def takes_turns(self, rows: Rows) -> Bools | None:
        turns: Bools = self._class[rows.index] == BATCH
        return turns

    def its_turn(self, step: int) -> bool:
        return step % self.cadences[1] == 0

    def arrived(self, rows: Rows, now: float) -> None:
        cost = rows.work + rows.predicted
        for i, request in enumerate(rows.requests):
            row, group = int(rows.index[i]), BATCH if request.request_class == "batch" else REALTIME
            self._class = reaching(self._class, row)
            self._class[row] = group
            self.shares.arrived(row, group, self.weights[group], float(cost[i]))

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        self.shares.served(self._class[rows.index], tokens)

    def ended(self, rows: Rows, now: float) -> None:
        for row in rows.index:
            self.shares.ended(int(self._class[row]))
