"""Lineup: who shares the next step, in the policy's order, with how many tokens each and with which blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from headway.core.accounting import WAIT_ROW, WAIT_STEP, Accounting, State
from headway.core.batch import Batch, Bools, Ints, Longs, Wait
from headway.core.board import Board
from headway.core.budget import StepLimits
from headway.core.kv_cache import BlockEntries, join_entries
from headway.core.load import Load
from headway.core.policies.base import in_order, standing
from headway.core.room import NOBODY, Room
from headway.core.step_time import StepTimeModel
from headway.core.strategies import Strategies
from headway.core.table import RUNNING, Floats, RequestTable, Rows, RowSet

OUTRANKED = "a better rank goes first"
HARDLY_LONGER = 1.15
"""Two steps instead of one may take so many times as long where lower ranks pause for a prompt."""


class Lineup:
    """Asks formation, policy and budget, each its own question, and notes what those left out wait for."""

    def __init__(
        self,
        strategies: Strategies,
        table: RequestTable,
        waiting: RowSet,
        board: Board,
        room: Room,
        accounting: Accounting,
        model: StepTimeModel,
    ) -> None:
        self._strategies = strategies
        self._table = table
        self._waiting = waiting
        self._board = board
        self._room = room
        self._pool = board.pool
        self._accounting = accounting
        self._model = model
        self._verdict: tuple[State, str] = (WAIT_STEP, "")
        self._refused: dict[int, tuple[State, str]] = {}

    def ready(self) -> Longs:
        """Rows on board that may be launched once more and still have something to compute."""
        table, rows = self._table, self._board.running.rows
        may = (table.launched[rows] < table.chain[rows]) & (table.target[rows] < table.limit[rows])
        return rows[may]

    def joining(self, ready: Longs, limits: StepLimits, admitted: int, more: bool, now: float) -> tuple[Longs, float]:
        """The rows of the queue that may come into the step, best first; and until when the doors are shut.

        `admitted` of the step's burst have come already; `more` is False where nobody else will come.
        """
        if not len(self._waiting):
            return NOBODY, math.inf
        self._refused.clear()
        queue = Rows(self._table, self._waiting.rows, now)
        most, limit = self._places(queue, ready, limits, admitted, now)
        self._verdict = WAIT_ROW, limit
        if most <= 0:
            return NOBODY, math.inf
        seated = np.concatenate([self._board.running.rows, self._board.lingering.rows])
        allowed = self._strategies.formation.may_join(queue, Rows(self._table, seated, now), more, now)
        if isinstance(allowed, Wait):
            self._verdict = State.WAIT_WINDOW, allowed.reason
            return NOBODY, allowed.until
        count = min(allowed, most)
        if count >= len(self._waiting):
            self._verdict = WAIT_STEP, ""
        leaders = self._leaders(queue, count, now)
        if self._strategies.policy.pauses:
            leaders = self._ahead_of(ready, leaders, limits, now)
            if len(leaders) < count:
                self._verdict = WAIT_ROW, "max_batch_size"
        for row in map(int, leaders):
            self._board.look_up(row)
        joining = self._room.let_in(leaders, now)
        if len(joining) < len(leaders):
            self._refuse(leaders[~np.isin(leaders, joining)], State.WAIT_BLOCKS, "")
        return joining, math.inf

    def _places(self, queue: Rows, ready: Longs, limits: StepLimits, admitted: int, now: float) -> tuple[int, str]:
        """How many may be admitted, and the limit that says so. Whom the best of the queue outranks gives its place."""
        bounds = [(self._openings(ready, limits, now), "max_batch_size")]
        burst_size = self._strategies.config.burst_size
        if burst_size is not None:
            bounds.append((burst_size - admitted, "burst_size"))
        most = min(bounds)[0]
        if most > self._board.vacant:
            self._room.make_places(queue, most, now)
        bounds.append((self._board.num_free, "max_num_seqs"))
        return min(bounds, key=lambda bound: bound[0])

    def _openings(self, ready: Longs, limits: StepLimits, now: float) -> int:
        """How many of the queue may hope for a place in the step: whom the best of it outranks may have to pause."""
        policy = self._strategies.policy
        if policy.pauses:
            return limits.rows
        waiting = policy.rank(Rows(self._table, self._waiting.rows, now))
        if waiting is not None:
            on_board = policy.rank(Rows(self._table, ready, now))
            ready = ready[on_board <= waiting.min()]
        return self._strategies.budget.openings(Rows(self._table, ready, now), limits)

    def _leaders(self, queue: Rows, count: int, now: float) -> Longs:
        """The `count` rows of lowest score, ties by age. A partial sort: the queue may be very long."""
        score = self._strategies.policy.score(queue, now)
        among = np.arange(len(score)) if count >= len(score) else _lowest(score, queue, count)
        order = np.lexsort((self._table.seq[queue.index[among]], score[among]))
        rows: Longs = queue.index[among[order]]
        return rows

    def outranked(self, batch: Batch, now: float) -> tuple[Longs, int, int]:
        """Who could still be left out of a batch that is not launched yet, for requests of the queue that outrank them:
        positions in it, first who goes first; and how many of the queue that is for, with how many tokens."""
        policy, table = self._strategies.policy, self._table
        queue = Rows(table, self._waiting.rows, now)
        waiting = standing(policy, queue) if len(queue) else None
        if waiting is None:
            return NOBODY, 0, 0
        ranks = policy.rank(Rows(table, batch.rows, now))
        assert ranks is not None, "a policy ranks all or none"
        fresh = np.isin(batch.slots, [new.slot for new in batch.admitted])
        below = ((ranks > waiting.min()) & (batch.num_tokens > 0) & ~fresh).nonzero()[0]
        if not len(below):
            return NOBODY, 0, 0
        rows = batch.rows[below]
        order = np.lexsort((-table.seq[rows], -ranks[below], table.phase[rows] == RUNNING))
        above = waiting < ranks[below].max()
        return below[order], int(np.count_nonzero(above)), int(queue.work[above].sum())

    def _ahead_of(self, ready: Longs, leaders: Longs, limits: StepLimits, now: float) -> Longs:
        """Those of the queue's best who get a row although all of `ready` want one too: others pause for them."""
        order = in_order(self._strategies.policy, Rows(self._table, np.concatenate([ready, leaders]), now))
        first: Longs = order[: limits.rows]
        joining: Longs = first[self._table.phase[first] != RUNNING]
        return joining

    def share(self, ready: Longs, joining: Longs, limits: StepLimits, now: float) -> tuple[Longs, Ints]:
        """The rows that get tokens in this step, in the policy's order, and how many each."""
        table = self._table
        if not len(joining) and len(ready) <= limits.rows:
            work = table.target[ready] - table.computed[ready]
            if np.count_nonzero(work == 1) == len(work):
                return ready, work  # everybody gets its one token: there is nothing to decide
        rows = in_order(self._strategies.policy, Rows(table, np.concatenate([ready, joining]), now))
        if self._strategies.policy.pauses and len(rows) > limits.rows:
            self._note_paused(rows[limits.rows :], now)
            rows = rows[: limits.rows]
        tokens = self._grant(rows, limits, now)
        granted = tokens > 0
        if np.count_nonzero(granted) < len(rows):
            self._note_ungranted(rows, granted, limits, now)
        return rows[granted], tokens[granted]

    def _note_paused(self, rows: Longs, now: float) -> None:
        """Others go first in this step: on board these pause, in the queue they find no row."""
        on_board = self._table.phase[rows] == RUNNING
        self.note_waits(rows[on_board], State.WAIT_POLICY, OUTRANKED, now)
        self.note_waits(rows[~on_board], WAIT_ROW, "max_batch_size", now)

    def _note_ungranted(self, rows: Longs, granted: Bools, limits: StepLimits, now: float) -> None:
        """Some got no tokens: they pause for a better rank, or the step has no row or no token left."""
        idle = rows[~granted]
        ranks = self._strategies.policy.rank(Rows(self._table, rows, now))
        if ranks is not None and np.count_nonzero(granted):
            pauses = (ranks[~granted] > ranks[granted].min()) & (self._table.phase[idle] == RUNNING)
            self.note_waits(idle[pauses], State.WAIT_POLICY, OUTRANKED, now)
            idle = idle[~pauses]
        if np.count_nonzero(granted) >= limits.rows:
            self.note_waits(idle, WAIT_ROW, "max_batch_size", now)
        else:
            self.note_waits(idle, State.WAIT_BUDGET, self._strategies.budget_limit, now)

    def _grant(self, rows: Longs, limits: StepLimits, now: float) -> Ints:
        """Tokens for each: what the budget gives, one rank after the other."""
        table, budget = self._table, self._strategies.budget
        everybody = Rows(table, rows, now)
        ranks = self._strategies.policy.rank(everybody)
        if ranks is None:
            return budget.grant(everybody, limits, now)
        tokens = np.zeros(len(rows), np.int32)
        for rank in np.unique(ranks):
            of_rank = (ranks == rank).nonzero()[0]
            members = Rows(table, rows[of_rank], now)
            tokens[of_rank] = granted = budget.grant(members, limits, now)
            limits = limits.beside(members, granted)
            if self._strategies.policy.pauses and np.count_nonzero(granted > 1):
                limits = replace(limits, tokens=min(limits.tokens, int(np.count_nonzero(everybody.work == 1))))
        if not self._strategies.policy.pauses:
            self._set_below_apart(rows, tokens, ranks)
        return tokens

    def _set_below_apart(self, rows: Longs, tokens: Ints, ranks: Ints) -> None:
        """Takes the tokens from those of lower rank than a prompt of the step, if they had better be a step apart."""
        prompts = (tokens > 1) & np.isnan(self._table.first_token[rows])
        if prompts.any():
            below = (ranks > ranks[prompts].min()) & (tokens > 0)
            if below.any() and self.apart(
                self._load(rows[~below], tokens[~below]), self._load(rows[below], tokens[below])
            ):
                tokens[below] = 0

    def _load(self, rows: Longs, tokens: Ints) -> Load:
        computing = tokens > 0
        rows, tokens = rows[computing], tokens[computing]
        starts = np.maximum(self._table.computed[rows], self._table.cached[rows])
        return Load.of(starts, tokens, np.zeros(len(tokens), np.int32))

    def apart(self, prompts: Load, below: Load) -> bool:
        """Whether those below pause while prompts of a higher rank are computed: where a step for each takes hardly
        longer than one for both, a first token need not wait for what is less urgent."""
        both = Load(*(one + other for one, other in zip(prompts, below, strict=True)))
        predict = self._model.predict
        return self._model.fitted and predict(prompts) + predict(below) <= HARDLY_LONGER * predict(both)

    def seat(self, rows: Longs, tokens: Ints, now: float) -> tuple[Longs, Ints, Longs, BlockEntries]:
        """Finds blocks, and slots for those who join.

        Returns the rows and tokens that remain, the newly admitted of them, and the new block table entries.
        """
        room, table = self._room, self._table
        boarded = table.phase[rows] == RUNNING
        if np.count_nonzero(boarded) == len(rows):
            entries = room.extend(rows, tokens)
            if entries is not None:
                return rows, tokens, NOBODY, entries
        need = room.need(rows, tokens)
        keep = boarded.copy()
        keep[boarded] = room.for_board(rows[boarded], need[boarded], now)
        pressed = np.count_nonzero(keep) < np.count_nonzero(boarded)
        self.note_waits(rows[boarded & ~keep], State.WAIT_BLOCKS, "", now)
        joining = rows[~boarded]
        if len(joining):
            for row in map(int, joining):
                self._board.recount(row)
            free = 0 if pressed else self._pool.available - int(need[boarded].sum())
            fits, reserve = room.for_queue(joining, free, now)
            keep[~boarded] = fits
            need[~boarded] = np.maximum(need[~boarded], reserve - table.found[joining])
            self.note_waits(joining[~fits], State.WAIT_BLOCKS, "", now)
            joining = joining[fits]
        shared = [self._board.take(row) for row in map(int, joining)]
        for row in map(int, joining):
            self._waiting.discard(row)
        rows, tokens = rows[keep], tokens[keep]
        entries = join_entries([*shared, room.give(rows, need[keep])])
        for row in map(int, joining):
            self._board.fetch(row)
        return rows, tokens, joining, entries

    def note_waits(self, rows: Longs, state: State, detail: str, now: float) -> None:
        """These rows got nothing in this step, because of `state`."""
        if not len(rows):
            return
        table = self._table
        on_board = table.phase[rows] == RUNNING
        idle = rows[on_board & (table.launched[rows] == 0)]
        if len(idle):
            self._accounting.enter(idle, state, now, detail)
        self._refuse(rows[~on_board], state, detail)

    def _refuse(self, rows: Longs, state: State, detail: str) -> None:
        """These of the queue were asked, but cannot come. Who stops the first of them stops all behind them."""
        for row in rows.tolist():
            if not self._refused:
                self._verdict = state, detail
            self._refused.setdefault(row, (state, detail))

    def explain(self, now: float) -> None:
        """Tells the accounting what those in the queue wait for."""
        accounting = self._accounting
        if not len(self._waiting):
            return accounting.queue_waits_for(WAIT_STEP, now)
        state, detail = self._verdict
        shut = accounting.turns_wait and not self._strategies.policy.its_turn(self._table.step)
        accounting.queue_waits_for(state, now, detail, shut=shut)
        if self._refused or accounting.some_apart:
            accounting.set_apart({row: why for row, why in self._refused.items() if row in self._waiting}, now)
        return None


def _lowest(score: Floats, queue: Rows, count: int) -> Longs:
    """Positions of the `count` lowest scores, of equal ones the oldest. Nothing is sorted: there may be 100,000."""
    limit = score.min() if count == 1 else np.partition(score, count - 1)[count - 1]
    among = np.flatnonzero(score <= limit)
    if len(among) == count:
        return among
    equal = score[among] == limit
    surely, tied = among[~equal], among[equal]
    missing = count - len(surely)
    seq = queue.seq[tied]
    oldest = tied[seq.argmin()][None] if missing == 1 else tied[np.argpartition(seq, missing - 1)[:missing]]
    return np.concatenate([surely, oldest])
