"""Room: KV blocks for the rows of a step. Who is on board is provided for first, then the queue in its order."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headway.core.batch import Bools, Ints, Longs
from headway.core.board import Board
from headway.core.kv_cache import NO_ENTRIES, BlockEntries, BlockPool, blocks_for
from headway.core.output_length import OutputLengthPredictor
from headway.core.policies.base import in_order, standing
from headway.core.preemption import Pressure
from headway.core.strategies import Strategies
from headway.core.table import RUNNING, RequestTable, Rows

NOBODY: Longs = np.zeros(0, np.int64)
SMALL = 8
"""Who needs so many times fewer blocks than another may be let past it."""


class Room:
    """Finds blocks, evicting where that helps. Nobody is evicted in vain: that it will then fit is checked first."""

    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool,
        board: Board,
        strategies: Strategies,
        preempt: Callable[[int, float], None],
        predictor: OutputLengthPredictor,
    ) -> None:
        self._table = table
        self._pool = pool
        self._board = board
        self._strategies = strategies
        self._preempt = preempt
        self._predictor = predictor
        self._first = -1
        self._first_since = 0.0

    def need(self, rows: Longs, tokens: Ints) -> Ints:
        """Blocks that rows int64[n] lack for `tokens` int32[n] more: int32[n], 0 where they have enough."""
        table, block_size = self._table, self._pool.block_size
        cached = table.cached[rows]
        held = np.maximum(table.blocks[rows], table.found[rows])
        lacking = blocks_for(np.maximum(table.computed[rows], cached) + tokens, block_size) - held
        result: Ints = np.maximum(lacking, 0)
        return result

    def extend(self, rows: Longs, tokens: Ints) -> BlockEntries | None:
        """The blocks that rows on board lack, if there are enough for all; None where somebody would have to give way.

        Most rows lack none in most steps, and what is cached of a row on board it holds.
        """
        table, block_size = self._table, self._pool.block_size
        ends, held = table.computed[rows] + tokens, table.blocks[rows]
        growing = (ends > held * block_size).nonzero()[0]
        if not len(growing):
            return NO_ENTRIES
        need = blocks_for(ends[growing], block_size) - held[growing]
        if int(need.sum()) > self._pool.available:
            return None
        return self._give(rows[growing], need)

    def give(self, rows: Longs, need: Ints) -> BlockEntries:
        """Hands the blocks out; they have been found before."""
        if not np.count_nonzero(need):
            return NO_ENTRIES
        grows = need > 0
        return self._give(rows[grows], need[grows])

    def _give(self, rows: Longs, counts: Ints) -> BlockEntries:
        self._table.blocks[rows] += counts
        return self._pool.extend(self._table.slot[rows], counts)

    def for_board(self, rows: Longs, need: Ints, now: float) -> Bools:
        """Which of the rows on board can have what they need; later ones in the order may be evicted for them."""
        if int(need.sum()) <= self._pool.available:
            return np.ones(len(rows), np.bool_)
        table = self._table
        order = in_order(self._strategies.policy, Rows(table, self._board.running.rows, now))
        place = {int(row): position for position, row in enumerate(order)}
        served = np.zeros(len(rows), np.bool_)
        free, coming = self._pool.available, self._board.leaving_blocks
        for i in sorted(range(len(rows)), key=lambda i: place[int(rows[i])]):
            row, wanted = int(rows[i]), int(need[i])
            if table.phase[row] != RUNNING:
                continue  # it has just been evicted itself
            if wanted > free:
                later = order[place[row] + 1 :]
                later = later[table.phase[later] == RUNNING]
                gained_now, gained_later = self.evict(later, wanted - free - coming, now)
                free += gained_now
                coming += gained_later
            if wanted <= free:
                free -= wanted
                served[i] = True
            else:  # it fits once a step is collected, or never: nobody behind it may take what there is
                coming = max(0, coming - (wanted - free))
                free = 0
        return served

    def evict(self, candidates: Longs, wanted: int, now: float, limit: float = math.inf) -> tuple[int, int]:
        """Evicts as many as it takes to gain `wanted` blocks, or nobody when all of them would not do, or when bringing
        them back would cost more than `limit` seconds.

        Returns the blocks gained now and those gained when the launched steps have been collected.
        """
        if wanted <= 0 or not len(candidates):
            return 0, 0
        pressure = self._pressure(candidates, wanted, limit)
        if pressure.gains.sum() < wanted:
            return 0, 0
        return self._leave(candidates, pressure, now)

    def _pressure(self, candidates: Longs, wanted: int, limit: float = math.inf) -> Pressure:
        table, pool = self._table, self._pool
        tables = pool.tables[table.slot[candidates]]
        others = (tables >= 0) & (pool.refs[tables] > 1)
        gains = (table.blocks[candidates] - np.count_nonzero(others, axis=1)).astype(np.int32)
        kept = np.logical_and.accumulate(others, axis=1).sum(axis=1, dtype=np.int32) * pool.block_size
        kept = np.minimum(kept, table.computed[candidates])
        return Pressure(gains, kept, wanted, self._board.host.available, pool.block_size, limit)

    def _leave(self, candidates: Longs, pressure: Pressure, now: float) -> tuple[int, int]:
        table = self._table
        gained_now = gained_later = 0
        for position, swap in self._strategies.preemption.victims(Rows(table, candidates, now), pressure, now):
            row = int(candidates[position])
            if table.launched[row]:
                gained_later += int(pressure.gains[position])
            else:
                gained_now += int(pressure.gains[position])
            if swap:
                self._board.host.reserve(row, int(blocks_for(table.computed[row], pressure.block_size)))
            self._preempt(row, now)
        return gained_now, gained_later

    def make_places(self, queue: Rows, most: int, now: float) -> None:
        """For up to `most` of the queue's best that have no place on board, rows of lower rank lose theirs.

        One for one, those of the lowest rank first; nobody where the first of the queue would not find blocks even so.
        """
        if self._strategies.formation.lingers:
            return  # nobody joins a padded group under way: a place in it is of no use
        waiting, board = standing(self._strategies.policy, queue), self._board.running.rows.copy()
        if waiting is None or not len(board):
            return
        ranks = self._strategies.policy.rank(Rows(self._table, board, now))
        assert ranks is not None, "a policy ranks all or none"
        vacant = self._board.vacant
        best = np.sort(waiting)[vacant:most]
        worst = np.sort(ranks)[::-1]
        count = int(np.count_nonzero(best[: len(worst)] < worst[: len(best)]))
        if not count or not self._could_fit(int(queue.index[waiting.argmin()]), board[ranks > waiting.min()]):
            return
        for rank in worst[:count].tolist():
            of_rank = board[(ranks == rank) & (self._table.phase[board] == RUNNING)]
            self._leave(of_rank, self._pressure(of_rank, 0), now)

    def _could_fit(self, row: int, below: Longs) -> bool:
        """Whether a row of the queue would find its blocks if all of those on board left."""
        whole = int(blocks_for(self._table.target[row], self._pool.block_size))
        gains = self._pressure(below, 0).gains
        return whole <= self._spare(self._pool.available) + self._board.leaving_blocks + int(gains.sum())

    def for_queue(self, rows: Longs, free: int, now: float) -> tuple[Bools, Ints]:
        """Which rows of the queue fit, in order, with all that is known of them, beside the promises already made.

        A prompt that is computed in chunks is promised the blocks of all of it, so that prompts never evict each other.
        Returns who fits, and the blocks that each must be given at once at least.
        """
        together, at_once = self._strategies.formation.claims(Rows(self._table, rows, now), self._pool.block_size)
        fits = together <= self._spare(free)
        if fits.any():
            fits &= self._reserved(rows, now)
        count = int(np.count_nonzero(fits))
        most = self._pool.tables.shape[1]
        return fits, np.full(len(rows), min(most, int(at_once[count - 1])) if count else 0, np.int32)

    def _reserved(self, rows: Longs, now: float) -> Bools:
        """Which of the rows the reservation lets in; what those hold who would have to make way does not count."""
        table, board = self._table, self._board.running.rows
        reservation = self._strategies.reservation
        if reservation.evicts:
            below = self._outranked(int(rows[0]), now)
            board = np.setdiff1d(board, below) if len(below) else board
        return reservation.fits(Rows(table, board, now), Rows(table, rows, now), self._pool, self._predictor)

    def _spare(self, free: int) -> int:
        """What is left of `free` blocks beside the promises made to those on board, and room for them to grow."""
        table, board = self._table, self._board.running.rows
        if not len(board):
            return free
        debts = blocks_for(table.target[board], self._pool.block_size) - table.blocks[board]
        headroom = self._strategies.reservation.headroom(len(board), self._pool.num_blocks)
        return free - headroom - int(np.maximum(debts, 0).sum())

    def let_in(self, rows: Longs, now: float) -> Longs:
        """Those of the queue's best rows that may join now.

        One that does not fit is passed by later ones that do, if they are small beside what it lacks: others would take
        what is becoming free for it. They are the first to leave: when it would fit in their place, and has waited for
        that as long as it costs to bring them back, it gets it.
        """
        table = self._table
        count = self._fitting(rows, now)
        table.backfilled[rows[:count]] = 0
        if count == len(rows) or self._strategies.formation.lingers:
            return rows[:count]
        whole = blocks_for(table.target[rows], self._pool.block_size) - table.shared[rows]
        left = self._spare(self._pool.available) - int(whole[:count].sum())
        head = rows[count]
        lacking = int(whole[count] + table.shared[head]) - left  # whom it shares with may be who is evicted
        coming = self._board.leaving_blocks
        if lacking > coming:
            below = self._outranked(head, now) if self._strategies.reservation.evicts else NOBODY
            limit = math.inf if len(below) else self._stood_first(head, now)
            may_leave = np.union1d(self._backfilled_behind(head, now), below)
            gained_now, gained_later = self.evict(may_leave, lacking - coming, now, limit)
            if gained_now or gained_later:
                return rows[: self._fitting(rows[: count + 1], now)]
        backfills = self._strategies.config.backfill and self._strategies.reservation.backfills
        if lacking <= coming or not backfills:
            return rows[:count]  # the blocks may be on their way to it: nobody may take them
        behind = rows[count + 1 :]
        chosen = []
        for row, blocks in zip(behind.tolist(), whole[count + 1 :].tolist(), strict=True):
            if blocks <= left and blocks * SMALL <= lacking:
                left -= blocks
                chosen.append(row)
        table.backfilled[chosen] = 1
        return np.concatenate([rows[:count], np.array(chosen, np.int64)])

    def _outranked(self, head: int, now: float) -> Longs:
        """The rows on board of lower rank than a row of the queue."""
        board = self._board.running.rows
        ranks = standing(self._strategies.policy, Rows(self._table, np.append(board, head), now))
        return NOBODY if ranks is None else board[ranks[:-1] > ranks[-1]]

    def _stood_first(self, head: int, now: float) -> float:
        """Seconds for which the first of the queue has been that, and has not fitted."""
        seq = int(self._table.seq[head])
        if seq != self._first:
            self._first, self._first_since = seq, now
        return now - self._first_since

    def _fitting(self, rows: Longs, now: float) -> int:
        """How many of the queue's best rows fit, one after the other."""
        for row in map(int, rows):
            self._board.recount(row)
        return int(np.count_nonzero(self.for_queue(rows, self._pool.available, now)[0]))

    def _backfilled_behind(self, head: int, now: float) -> Longs:
        """The rows on board that have passed `head`, in the policy's order."""
        board = self._board.running.rows
        passed = board[self._table.backfilled[board] == 1]
        order = in_order(self._strategies.policy, Rows(self._table, np.append(passed, head), now))
        return order[int(np.flatnonzero(order == head)[0]) + 1 :]
