"""DecodeStep: the step in which everybody who may be computed decodes and nothing is to be decided.

The general rules come to the same batch. It has a way of its own because it is most of what an engine does, and most of
what they would ask is known of it beforehand.
"""

from __future__ import annotations

import numpy as np

from headway.core.accounting import DECODE, Accounting
from headway.core.batch import Batch, Bools, Ints
from headway.core.board import Board
from headway.core.kv_cache import NO_ENTRIES
from headway.core.load import Load
from headway.core.strategies import Strategies
from headway.core.table import RequestTable, Rows


class DecodeStep:
    """Of a scheduler whose queue is empty."""

    def __init__(self, strategies: Strategies, table: RequestTable, board: Board, accounting: Accounting) -> None:
        self._strategies = strategies
        self._table = table
        self._board = board
        self._pool = board.pool
        self._accounting = accounting
        self._ones: Ints = np.ones(board.num_slots, np.int32)
        self._zeros: Ints = np.zeros(board.num_slots, np.int32)
        self._all: Bools = np.ones(board.num_slots, np.bool_)

    def launch(self, step_id: int, now: float) -> Batch | None:
        """One token for each row on board that may be computed; its tokens count as computed from here on.

        None where some of them lack more than one token or have not decoded yet, or where there are too many for a
        step or too few blocks: the general rules must be asked.
        """
        table, board, strategies = self._table, self._board, self._strategies
        if len(board.lingering) or not len(board.running):
            return None
        rows = board.running.rows.copy()
        target, launched = table.target[rows], table.launched[rows]
        may = (launched < table.chain[rows]) & (target < table.limit[rows])
        if np.count_nonzero(may) < len(rows):
            rows, target, launched = rows[may], target[may], launched[may]
        starts, count = table.computed[rows], len(rows)
        decode = (starts + 1 == target) & (self._accounting.state[rows] == DECODE)
        if not 0 < count <= strategies.config.max_batch_size or np.count_nonzero(decode) < count:
            return None
        slots, entries = table.slot[rows], NO_ENTRIES
        full = (target > table.blocks[rows] * self._pool.block_size).nonzero()[0]
        if len(full):
            if len(full) > self._pool.available:
                return None
            table.blocks[rows[full]] += 1
            entries = self._pool.grow(slots[full])
        ones = self._ones[:count]
        strategies.policy.served(Rows(table, rows, now), ones, now)
        table.computed[rows] = target
        table.target[rows] = target + 1
        table.launched[rows] = launched + 1
        return Batch(
            step_id=step_id,
            rows=rows,
            slots=slots.astype(np.int32),
            starts=starts,
            num_tokens=ones,
            samples=self._all[:count],
            pad_tokens=self._zeros[:count],
            admitted=(),
            block_slots=entries[0],
            block_index=entries[1],
            block_ids=entries[2],
            load=Load(float(count), 0.0, float(count), float(np.add.reduce(target))),
        )
