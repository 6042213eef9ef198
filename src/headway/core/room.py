"""Room: KV blocks for the rows of a step. Who is on board is provided for first, then the queue in its order."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from headway.core.batch import Bools, Ints, Longs
from headway.core.board import Board
from headway.core.kv_cache import NO_ENTRIES, BlockEntries, BlockPool, blocks_for
from headway.core.preemption import Preemption
from headway.core.table import Phase, RequestTable, Rows

NOBODY: Longs = np.zeros(0, np.int64)


class Room:
    """Finds blocks, evicting where that helps. Nobody is evicted in vain: that it will then fit is checked first."""

    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool,
        board: Board,
        preemption: Preemption,
        in_order: Callable[[Longs, float], Longs],
        preempt: Callable[[int, float], None],
    ) -> None:
        self._table = table
        self._pool = pool
        self._board = board
        self._preemption = preemption
        self._in_order = in_order
        self._preempt = preempt
        self._watermark = math.ceil(0.01 * pool.num_blocks)

    def need(self, rows: Longs, tokens: Ints) -> Ints:
        """Blocks that rows int64[n] lack for `tokens` int32[n] more: int32[n], 0 where they have enough."""
        table = self._table
        lacking = blocks_for(table.computed[rows] + tokens, self._pool.block_size) - table.blocks[rows]
        result: Ints = np.maximum(lacking, 0)
        return result

    def give(self, rows: Longs, need: Ints) -> BlockEntries:
        """Hands the blocks out; they have been found before."""
        if not np.count_nonzero(need):
            return NO_ENTRIES
        grows = need > 0
        growing, counts = rows[grows], need[grows]
        self._table.blocks[growing] += counts
        return self._pool.extend(self._table.slot[growing], counts)

    def for_board(self, rows: Longs, need: Ints, now: float) -> Bools:
        """Which of the rows on board can have what they need; later ones in the order may be evicted for them."""
        if int(need.sum()) <= self._pool.available:
            return np.ones(len(rows), np.bool_)
        table = self._table
        order = self._in_order(self._board.running.rows, now)
        place = {int(row): position for position, row in enumerate(order)}
        served = np.zeros(len(rows), np.bool_)
        free, coming = self._pool.available, self._board.leaving_blocks
        for i in sorted(range(len(rows)), key=lambda i: place[int(rows[i])]):
            row, wanted = int(rows[i]), int(need[i])
            if table.phase[row] != Phase.RUNNING:
                continue  # it has just been evicted itself
            if wanted > free:
                later = order[place[row] + 1 :]
                later = later[table.phase[later] == Phase.RUNNING]
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

    def evict(self, candidates: Longs, wanted: int, now: float) -> tuple[int, int]:
        """Evicts as many as it takes to gain `wanted` blocks, or nobody when all of them would not do.

        Returns the blocks gained now and those gained when the launched steps have been collected.
        """
        table = self._table
        if wanted <= 0 or int(table.blocks[candidates].sum()) < wanted:
            return 0, 0
        gained_now = gained_later = 0
        for position in self._preemption.victims(Rows(table, candidates, now), now):
            if gained_now + gained_later >= wanted:
                break
            row = int(candidates[position])
            blocks = int(table.blocks[row])
            if table.launched[row]:
                gained_later += blocks
            else:
                gained_now += blocks
            self._preempt(row, now)
        return gained_now, gained_later

    def for_queue(self, rows: Longs, free: int) -> Bools:
        """Which rows of the queue fit, in order, with all that is known of them, beside the promises already made.

        A prompt that is computed in chunks is promised the blocks of all of it, so that prompts never evict each other.
        """
        table, block_size = self._table, self._pool.block_size
        whole = blocks_for(table.target[rows], block_size)
        board = self._board.running.rows
        debts = blocks_for(table.target[board], block_size) - table.blocks[board]
        headroom = self._watermark if len(board) else 0
        spare = free - headroom - int(np.maximum(debts, 0).sum())
        return np.cumsum(whole) <= spare
