"""Forecast: when a request that has just come would be served, predicted from what is known at that moment.

Its wait is the work that goes ahead of it, over the places there are: who holds one and for how much longer, who waits
and has a better score, and who will have, if as much comes as came lately. Nothing here reads a clock, so a replay
predicts the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from headway.core.batch import Bools, Ints, Longs
from headway.core.board import Board
from headway.core.promise import Pace, costs, remaining_outputs
from headway.core.request import Slo
from headway.core.step_time import StepTimeModel
from headway.core.strategies import Strategies
from headway.core.table import RUNNING, Floats, RequestTable, Rows, RowSet

SAMPLE = 2048
"""Waiting requests that are looked at: of more, every so many-th stands for its neighbours."""
RECENT = 64
WINDOWS = (16, 32, RECENT)
"""Arrivals over which the rate of work is taken; the lowest counts, so that no burst speaks for what will come."""
LONGEST = 3600.0
"""Seconds: the longest wait that is told. What comes in faster than it goes out never ends."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now: until it holds a place (`queue`), until the first token (`wait`), until the last (`end`); and
    per token between (`tpot`)."""

    queue: float
    wait: float
    end: float
    tpot: float

    def keeps(self, rows: Rows) -> bool:
        """Whether that is what the one row was promised."""
        slo = rows.requests[0].slo
        late = float(rows.waited[0])
        return (
            late + self.wait <= slo.ttft
            and late + self.end <= slo.deadline
            and late + self.queue <= slo.max_queue
            and self.tpot <= slo.tpot
        )

    def complaint(self, slo: Slo) -> str:
        """What a client is told whose promise would not be kept."""
        promised = {"ttft": slo.ttft, "tpot": slo.tpot, "deadline": slo.deadline, "max_queue": slo.max_queue}
        asked = ", ".join(f"{name} {seconds:g} s" for name, seconds in promised.items() if seconds < math.inf)
        return (
            f"What was asked for ({asked}) cannot be kept now: the first token is predicted after {self.wait:.1f} s, "
            f"the last after {self.end:.1f} s, with {1e3 * self.tpot:.0f} ms per token between"
        )


class Forecaster:
    """Predicts, and keeps in mind what came lately: when, its score and what it costs."""

    def __init__(
        self, table: RequestTable, waiting: RowSet, board: Board, strategies: Strategies, model: StepTimeModel
    ) -> None:
        self._table = table
        self._waiting = waiting
        self._board = board
        self._strategies = strategies
        self._model = model
        self._recent = np.zeros((RECENT, 3))
        self._count = 0

    def accepted(self, row: int) -> None:
        """A request that will be served has joined the queue."""
        rows = Rows(self._table, np.array([row]), 0.0)
        cost = costs(rows, Pace.of(self._model))[0]
        self._recent[self._count % RECENT] = rows.arrival[0], self._strategies.policy.score(rows, 0.0)[0], cost
        self._count += 1

    def of(self, row: int, now: float) -> Forecast | None:
        """For a row of the queue; None while nothing is known of the device."""
        if not self._model.fitted:
            return None
        own = Rows(self._table, np.array([row]), now)
        waiting = self._waiting.rows
        stride = 1 + len(waiting) // SAMPLE
        waiting = waiting[::stride]
        others = np.concatenate([waiting[waiting != row], self._board.running.rows])
        score = self._strategies.policy.score(Rows(self._table, np.append(others, row), now), now)
        ahead = score[:-1] <= score[-1]
        beside = self._beside(own, others[~ahead])
        forecast = self._forecast(own, Rows(self._table, others[ahead], now), beside, stride, last=False)
        if self._strategies.policy.relegates and not forecast.keeps(own):
            forecast = self._forecast(own, Rows(self._table, others, now), 0.0, stride, last=True)
        return forecast

    def _beside(self, own: Rows, behind: Longs) -> float:
        """Tokens that prompts on board compute while its own is computed, though they are behind it: a few share."""
        lacking = Rows(self._table, behind[self._table.phase[behind] == RUNNING], own.now).work
        sharing = self._strategies.config.max_num_partial_prefills - 1
        shares = np.sort(np.minimum(lacking[lacking > 1], own.work[0]))[::-1]
        return float(shares[:sharing].sum())

    def _forecast(self, own: Rows, ahead: Rows, beside: float, stride: int, last: bool) -> Forecast:
        """`ahead`: who goes first, on board and, one for each `stride`, in the queue. `beside`: tokens of prompts that
        are computed with its own. `last`: whoever comes later will go first, too."""
        pace = Pace.of(self._model)
        cap = self._prompt_tokens(pace)
        waits = ahead.phase != RUNNING
        lacking = ahead.work
        weight = np.where(waits, stride, 1) * (waits | (lacking > 1))  # who decodes already holds its place
        prompts = float(weight @ lacking)
        steps = max(self._steps_to_a_place(ahead, weight, waits, cap), prompts / cap)
        work = float(own.work[0]) + beside
        queue = steps * pace.decode + prompts * pace.prefill
        wait = self._with_later(own, queue + math.ceil(work / cap) * pace.decode + work * pace.prefill, last)
        tpot = pace.decode if self._strategies.config.budget == "latency" else pace.step
        return Forecast(min(queue, LONGEST), wait, wait + float(remaining_outputs(own)[0] - 1) * pace.step, tpot)

    def _prompt_tokens(self, pace: Pace) -> float:
        """Tokens of prompts that a step can take beside its decodes."""
        config = self._strategies.config
        most = config.max_num_batched_tokens - min(config.max_batch_size, pace.rows)
        if config.budget == "latency" and pace.prefill > 0:
            promised = self._table.tpot[self._board.running.rows]
            promise = min(config.tpot_slo, float(promised.min(initial=math.inf)))
            most = min(most, (promise / 1.1 - pace.decode) / pace.prefill)
        return max(16.0, most)

    def _steps_to_a_place(self, ahead: Rows, weight: Ints, waits: Bools, cap: float) -> float:
        """Steps until there is a row for one more, and a place on board.

        Who decodes leaves after as many steps as its answer is expected to have; who is ahead and does not decode yet
        takes a row first, for as long as its answer and its share of the prompts' tokens take.
        """
        config, board = self._strategies.config, Rows(self._table, self._board.running.rows, ahead.now)
        residual = np.sort(remaining_outputs(board)[board.work <= 1])
        count = int(weight.sum())
        taken = remaining_outputs(ahead) + ahead.work * config.max_num_partial_prefills / cap
        mean = float(weight @ taken) / count if count else 0.0
        rows = min(config.max_batch_size, self._fitting(board, ahead))
        steps = _turn(residual, max(0, rows - len(residual)), 1 + count, mean)
        places = config.seqs - len(board)
        queued = int(weight[waits].sum())
        return max(steps, _turn(residual, places, 1 + queued, mean)) if queued >= places else steps

    def _fitting(self, board: Rows, ahead: Rows) -> int:
        """Requests that there are blocks for, at the length that these are expected to reach."""
        pool, lengths = self._board.pool, [rows.prompt_len + rows.predicted for rows in (board, ahead)]
        mean = float(np.concatenate(lengths).mean()) if len(board) or len(ahead) else 1.0
        return max(1, int(pool.num_blocks * pool.block_size / mean))

    def _with_later(self, own: Rows, wait: float, last: bool) -> float:
        """`wait` seconds, and the work of those who come meanwhile and go ahead.

        W = wait + the sum over recent arrivals of rate x min(W, how long such a one may come and still go ahead).
        """
        policy, now = self._strategies.policy, own.now
        if self._count < WINDOWS[0]:
            return wait
        order = (self._count - 1 - np.arange(min(self._count, RECENT))) % RECENT
        arrived, score, cost = self._recent[order].T
        mine = float(policy.score(own, 0.0)[0])
        if last:
            span = np.full(len(order), math.inf)
        elif policy.drifts:
            span = np.maximum(0.0, mine - (score + now - arrived))
        else:
            span = np.where(score < mine, math.inf, 0.0)
        rates = [cost[:count] / max(now - arrived[count - 1], 1e-3) for count in WINDOWS if count <= len(order)]
        least = min(range(len(rates)), key=lambda i: float(rates[i] @ (span[: len(rates[i])] > 0)))
        rate, span = rates[least], span[: len(rates[least])]
        total = wait
        for _ in range(64):
            longer = wait + float(rate @ np.minimum(span, total))
            if longer > LONGEST or longer - total < 0.01 * total:
                return min(longer, LONGEST)
            total = longer
        return total


def _turn(residual: Floats, free: int, turn: int, mean: float) -> float:
    """Steps until the `turn`-th can take a place, where `free` are free and others come free after `residual` steps.

    Each is taken for `mean` steps. If only the first j were used, the n-th would have its turn at
    (r_1 + ... + r_j + (n - j) mean) / j, but not before the j-th is there.
    """
    if turn <= free:
        return 0.0
    residual = np.concatenate([np.zeros(free), residual])
    if not len(residual):
        return 0.0
    places = np.arange(1, len(residual) + 1)
    at = (np.cumsum(residual) + (turn - places) * mean) / places
    return float(np.maximum(residual, at).min())
