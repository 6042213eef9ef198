"""Board: who holds an executor slot, and the tokens that are known of each."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Admission, Ints, Longs
from headway.core.kv_cache import BlockPool
from headway.core.table import Phase, RequestTable, RowSet


class Board:
    """Slots 0 .. num_slots - 1. A row that leaves to come back takes its tokens along.

    `running`: the rows that may be computed. `lingering`: rows of a padded group that have ended but keep their places
    until all of it has. `leaving_blocks`: blocks held by rows that have ended or lost their place,
    and that come back when the launched steps which touch them have been collected.
    """

    def __init__(self, table: RequestTable, pool: BlockPool, num_slots: int, max_model_len: int) -> None:
        self.running = RowSet(num_slots)
        self.lingering = RowSet(num_slots)
        self.leaving_blocks = 0
        self.num_slots = num_slots
        self._table = table
        self._pool = pool
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._tokens = np.zeros((num_slots, max_model_len + 1), np.int32)
        self._saved: dict[int, Ints] = {}

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def take(self, row: int) -> None:
        """Gives a row of the queue a slot."""
        table = self._table
        slot = self._free_slots.pop()
        table.slot[row] = slot
        table.phase[row] = Phase.RUNNING
        known = self._saved.pop(row, None)
        tokens = table.request(row).prompt_token_ids if known is None else known
        self._tokens[slot, : len(tokens)] = tokens
        self.running.add(row)

    def admission(self, row: int) -> Admission:
        """What the executor must know of a row that has just been taken."""
        table, request = self._table, self._table.request(row)
        slot = int(table.slot[row])
        return Admission(
            slot=slot,
            handle=request.handle,
            token_ids=self._tokens[slot, : table.length[row]].copy(),
            prompt_len=int(table.prompt_len[row]),
            params=request.params,
            stop_token_ids=request.stop_token_ids,
            choice=request.choice,
        )

    def append(self, rows: Longs, tokens: Ints) -> None:
        """One new token for each of rows int64[n]."""
        table = self._table
        length = table.length[rows]
        self._tokens[table.slot[rows], length] = tokens
        table.length[rows] = length + 1

    def stop_running(self, row: int, phase: Phase) -> None:
        """A running row has ended or lost its place: its blocks will come back."""
        self.running.discard(row)
        self.leaving_blocks += int(self._table.blocks[row])
        self._table.phase[row] = phase

    def vacate(self, row: int) -> None:
        """Takes slot and blocks back; a row that is only leaving for a while keeps its tokens."""
        table = self._table
        slot = int(table.slot[row])
        self.lingering.discard(row)
        if table.phase[row] == Phase.LEAVING:
            self._saved[row] = self._tokens[slot, : table.length[row]].copy()
        self.leaving_blocks -= int(table.blocks[row])
        self._pool.release(slot)
        self._free_slots.append(slot)
        table.slot[row] = -1
        table.blocks[row] = table.computed[row] = 0
        table.target[row] = table.length[row]

    def forget(self, row: int) -> None:
        """A row that waited to come back will not."""
        self._saved.pop(row, None)

    def check(self) -> None:
        """Raises AssertionError where rows, slots and blocks do not add up."""
        table = self._table
        seated = table.phase >= Phase.RUNNING
        slots = table.slot[seated]
        assert len(slots) + self.num_free == self.num_slots, "a slot is lost"
        assert sorted([*slots.tolist(), *self._free_slots]) == list(range(self.num_slots)), "a slot has two owners"
        np.testing.assert_array_equal(self._pool.held[slots], table.blocks[seated], "blocks held and counted differ")
        assert len(self.running) == np.count_nonzero(table.phase == Phase.RUNNING), "the board and the table differ"
        gone = (table.phase == Phase.LEAVING) | (table.phase == Phase.ENDED)
        assert self.leaving_blocks == table.blocks[gone].sum(), "blocks that will come back are miscounted"
        waiting_again = set(self._saved) - set(np.flatnonzero(table.phase == Phase.WAITING).tolist())
        assert not waiting_again, "tokens are kept of a row that does not wait"
