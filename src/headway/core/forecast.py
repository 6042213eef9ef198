"""Forecast: when a request that has just come would be served, predicted from what is known at that moment.

Its wait is the work that goes ahead of it, over the places there are: who holds one and for how much longer, who waits
and has a better score, and who will have, if as much comes as came lately. Of padded groups, which leave together, it
knows nothing: there it is too hopeful. Nothing here reads a clock, so a replay predicts the same.
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
MARGIN = 1.1
"""By how much steps of the latency budget stay within what is promised, about."""
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
        """For a row of the queue; None while the device or the lengths of answers are not known."""
        if not self._model.fitted:
            return None
        own = Rows(self._table, np.array([row]), now)
        waiting = self._waiting.rows
        stride = 1 + len(waiting) // SAMPLE
        waiting = waiting[::stride]
        others = np.concatenate([waiting[waiting != row], self._board.running.rows])
        everybody = Rows(self._table, np.append(others, row), now)
        if not everybody.sure.all():
            return None
        score = self._strategies.policy.score(everybody, now)
        ahead = score[:-1] <= score[-1]
        return self._forecast(own, Rows(self._table, others[ahead], now), others[~ahead], stride)

    def _forecast(self, own: Rows, ahead: Rows, behind: Longs, stride: int) -> Forecast:
        """`ahead` goes first, on board and, one for each `stride`, in the queue; `behind` does not."""
        pace = Pace.of(self._model)
        cap = self._prompt_tokens(pace)
        waits = ahead.phase != RUNNING
        lacking = ahead.work
        weight = np.where(waits, stride, 1) * (waits | (lacking > 1))  # who decodes already holds its place
        work = int(own.work[0])
        shared, beside = self._sharing(work, lacking[weight > 0], behind, own.now)
        prompts = float(weight @ lacking) - shared
        steps = max(self._steps_to_a_place(own, ahead, weight, waits, cap), prompts / cap)
        queue = steps * pace.decode + prompts * pace.prefill
        work += beside
        wait = self._with_later(own, queue + math.ceil(work / cap) * pace.decode + work * pace.prefill)
        tpot = pace.decode if self._strategies.config.budget == "latency" else pace.step
        return Forecast(min(queue, LONGEST), wait, wait + float(remaining_outputs(own)[0] - 1) * pace.step, tpot)

    def _sharing(self, work: int, ahead: Ints, behind: Longs, now: float) -> tuple[int, int]:
        """A few prompts share a step in equal parts: tokens of those ahead that are computed with its own `work` rather
        than before, and how many tokens of others are done, of these and of prompts behind, when its own are."""
        sharing = self._strategies.config.max_num_partial_prefills - 1
        first = np.sort(ahead)[::-1][:sharing]
        later = Rows(self._table, behind[self._table.phase[behind] == RUNNING], now).work
        later = np.sort(later[later > 1])[::-1][: sharing - len(first)]
        return int(first.sum()), int(np.minimum(first, work).sum() + np.minimum(later, work).sum())

    def _prompt_tokens(self, pace: Pace) -> float:
        """Tokens of prompts that a step can take beside its decodes."""
        config = self._strategies.config
        most = config.max_num_batched_tokens - min(config.max_batch_size, pace.rows)
        if config.budget == "latency" and pace.prefill > 0:
            promised = self._table.tpot[self._board.running.rows]
            promise = np.where(np.isinf(promised), config.tpot_slo, promised).min(initial=math.inf)
            most = min(most, (float(promise) / MARGIN - pace.decode) / pace.prefill)
        return max(16.0, most)

    def _steps_to_a_place(self, own: Rows, ahead: Rows, weight: Ints, waits: Bools, cap: float) -> float:
        """Steps until there is a row for one more, and a place on board.

        Who decodes leaves after as many steps as its answer is expected to have; who is ahead and does not decode yet
        takes a row first, for as long as its answer and its share of the prompts' tokens take.
        """
        config, board = self._strategies.config, Rows(self._table, self._board.running.rows, own.now)
        stays = board.work <= 1
        ranks, rank = self._strategies.policy.rank(board), self._strategies.policy.rank(own)
        if ranks is not None and rank is not None:
            stays &= ranks <= rank  # whom it outranks makes way
        residual = np.sort(remaining_outputs(board)[stays])
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

    def _with_later(self, own: Rows, wait: float) -> float:
        """`wait` seconds, and the work of those who come in this time and go ahead, if they come as they did lately."""
        policy, now = self._strategies.policy, own.now
        mine = float(policy.score(own, 0.0)[0])
        order = (self._count - 1 - np.arange(min(self._count, RECENT))) % RECENT
        arrived, score, cost = self._recent[order].T
        if policy.drifts:
            span = np.clip(mine - (score + now - arrived), 0.0, wait)
        else:
            span = np.where(score < mine, wait, 0.0)
        work = np.cumsum(cost * span)
        added = [work[count - 1] / max(now - arrived[count - 1], 1e-3) for count in WINDOWS if count <= len(order)]
        return min(LONGEST, wait + float(min(added, default=0.0)))


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
