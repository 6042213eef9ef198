"""Launch: from chosen rows to a batch.

From the launch on a step's tokens count as computed, so that the next step can be put together before it is collected.
"""

from __future__ import annotations

import numpy as np

from headway.core.accounting import DECODE, PREFILL, Accounting
from headway.core.batch import NO_SWAPS, Batch, Ints, Longs, Swaps
from headway.core.board import Board
from headway.core.counters import Counters
from headway.core.exits import Exits
from headway.core.kv_cache import BlockEntries
from headway.core.preemption import GUARDED_STEPS
from headway.core.strategies import Strategies
from headway.core.table import RequestTable, Rows


class Launch:
    """Makes batches by the general rules; DecodeStep has a short way of its own."""

    def __init__(
        self,
        strategies: Strategies,
        table: RequestTable,
        board: Board,
        accounting: Accounting,
        exits: Exits,
        counters: Counters,
    ) -> None:
        self._strategies = strategies
        self._table = table
        self._board = board
        self._host = board.host
        self._accounting = accounting
        self._exits = exits
        self._counters = counters

    def launch(
        self, step_id: int, rows: Longs, tokens: Ints, admitted: Longs, entries: BlockEntries, now: float
    ) -> Batch:
        """The step of rows int64[n] with `tokens` int32[n] each, and of those that linger in a padded group."""
        table, counters = self._table, self._counters
        self._note_computing(rows, table.computed[rows], now)
        self._strategies.policy.served(Rows(table, rows, now), tokens, now)
        if len(admitted):
            self._note_admitted(admitted, step_id)
            self._accounting.boarded(admitted, now)
        counters.num_batched_rows += len(rows)
        lingering = self._board.lingering.rows
        if len(lingering):
            rows = np.concatenate([rows, lingering])
            tokens = np.concatenate([tokens, np.zeros(len(lingering), np.int32)])
        starts = table.computed[rows]
        target = table.target[rows]
        computed = starts + tokens
        samples = computed == target
        if len(lingering):
            samples &= tokens > 0
        table.computed[rows] = computed
        table.target[rows] = target + samples
        table.launched[rows] += 1
        batch = Batch(
            step_id=step_id,
            rows=rows,
            slots=table.slot[rows].astype(np.int32),
            starts=starts,
            num_tokens=tokens,
            samples=samples,
            pad_tokens=self._strategies.formation.pad(tokens),
            admitted=tuple(self._board.admission(int(row)) for row in admitted),
            block_slots=entries[0],
            block_index=entries[1],
            block_ids=entries[2],
            swaps=self._copies(step_id) if self._host.copying else NO_SWAPS,
        )
        padding = int(batch.pad_tokens.sum()) if self._strategies.formation.lingers else 0
        counters.num_pad_tokens += padding
        counters.num_batched_tokens += int(batch.load.tokens) - padding
        return batch

    def _note_computing(self, rows: Longs, starts: Ints, now: float) -> None:
        """Rows of the step prefill until the token at their end is there (commit says so), and decode from then on."""
        table, accounting = self._table, self._accounting
        elsewhere = accounting.state[rows] != DECODE
        if not np.count_nonzero(elsewhere):
            return  # who decodes goes on decoding
        rows, starts = rows[elsewhere], starts[elsewhere]
        prefills = (starts < table.length[rows] - 1) | np.isnan(table.first_token[rows])
        prefills |= accounting.state[rows] == PREFILL
        state = np.where(prefills, PREFILL, DECODE).astype(np.int8)
        accounting.enter(rows, state, now)

    def _note_admitted(self, rows: Longs, step_id: int) -> None:
        """Counts what they found and what they had lost; who comes back again is guarded for a while."""
        table, counters = self._table, self._counters
        counters.num_prefix_queries += int(table.target[rows].sum())
        counters.num_prefix_hits += int(table.found[rows].sum()) * self._board.pool.block_size
        counters.num_recomputed_tokens += int(np.maximum(table.lost[rows] - table.computed[rows], 0).sum())
        table.lost[rows] = 0
        again = rows[table.preemptions[rows] > 0]
        table.guarded_until[again] = step_id + GUARDED_STEPS

    def _copies(self, step_id: int) -> Swaps:
        swaps, rows = self._host.copies()
        self._exits.copying(step_id, rows)
        self._counters.num_swapped_blocks += len(swaps)
        return swaps
