"""Withdrawal: rows leave a batch that is prepared but not under way, for requests that have come since and go first."""

from __future__ import annotations

import numpy as np

from headway.core.accounting import State
from headway.core.batch import Batch, Longs, without
from headway.core.budget import StepLimits
from headway.core.counters import Counters
from headway.core.exits import Exits
from headway.core.lineup import OUTRANKED, Lineup
from headway.core.load import Load
from headway.core.strategies import Strategies
from headway.core.table import RUNNING, RequestTable, Rows


class Withdrawal:
    """Undoes their launch: they pause for one step."""

    def __init__(
        self, strategies: Strategies, table: RequestTable, lineup: Lineup, exits: Exits, counters: Counters
    ) -> None:
        self._strategies = strategies
        self._table = table
        self._lineup = lineup
        self._exits = exits
        self._counters = counters

    def limits(self, batch: Batch, now: float) -> tuple[StepLimits, Longs]:
        """What the batch has left for others, with what could be withdrawn for those who go first; and positions in it
        of whom that is taken from, first who goes first."""
        config = self._strategies.config
        rows, tokens = config.max_batch_size - len(batch.rows), config.max_num_batched_tokens - batch.total_tokens
        below, above, work = self._lineup.outranked(batch, now)
        rows = max(rows, min(above, rows + len(below)))
        tokens = max(tokens, min(work, tokens + int(batch.num_tokens[below].sum())))
        return StepLimits(rows, tokens, batch.load), below

    def withdraw(self, batch: Batch, below: Longs, late: Batch, now: float) -> Batch:
        """The batch without as many of `below` as it takes for `late` to find rows and tokens in it."""
        config = self._strategies.config
        rows = len(batch.rows) + len(late.rows) - config.max_batch_size
        tokens = batch.total_tokens + late.total_tokens - config.max_num_batched_tokens
        freed = np.cumsum(batch.num_tokens[below])
        count = max(rows, int(np.searchsorted(freed, tokens)) + 1 if tokens > 0 else 0)
        if len(below) and late.load.tokens > late.load.rows:
            keep = without(batch, below).load
            prompts = Load(*(one + other for one, other in zip(keep, late.load, strict=True)))
            paused = Load.of(batch.starts[below], batch.num_tokens[below], batch.pad_tokens[below])
            count = len(below) if self._lineup.apart(prompts, paused) else count
        if count <= 0:
            return batch
        leave = below[:count]
        gone = batch.rows[leave]
        batch = self._take_back(batch, leave, now)
        self._lineup.note_waits(gone[self._table.phase[gone] == RUNNING], State.WAIT_POLICY, OUTRANKED, now)
        self._exits.settle(gone, now)
        return batch

    def _take_back(self, batch: Batch, leave: Longs, now: float) -> Batch:
        """The batch without the rows at positions `leave` int64[k]: their tokens are yet to be computed after all."""
        gone, table = batch.rows[leave], self._table
        table.computed[gone] -= batch.num_tokens[leave]
        table.target[gone] -= batch.samples[leave]
        table.launched[gone] -= 1
        self._strategies.policy.served(Rows(table, gone, now), -batch.num_tokens[leave], now)
        self._counters.num_batched_rows -= len(leave)
        self._counters.num_batched_tokens -= int(batch.num_tokens[leave].sum())
        return without(batch, leave)
