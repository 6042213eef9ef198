"""Collect: what the output of a step means for its rows: new tokens, ends, blocks that others can find."""

from __future__ import annotations

import numpy as np

from headway.core.accounting import DECODE, PREFILL, Accounting
from headway.core.batch import Batch, Bools, Finished, Ints, Longs, StepOutput
from headway.core.board import Board
from headway.core.exits import Exits
from headway.core.output_length import OutputLengthPredictor
from headway.core.request import FinishReason
from headway.core.table import ENDED, RequestTable


class Collect:
    """Of one step after the other, in the order of their launches."""

    def __init__(
        self,
        table: RequestTable,
        board: Board,
        accounting: Accounting,
        output_length: OutputLengthPredictor,
        exits: Exits,
    ) -> None:
        self._table = table
        self._board = board
        self._accounting = accounting
        self._output_length = output_length
        self._exits = exits

    def append(self, rows: Longs, tokens: Ints, step_id: int, now: float) -> list[Finished]:
        """One new token for each of rows; returns the ends that follow from them."""
        table, accounting = self._table, self._accounting
        length = self._board.append(rows, tokens)
        elsewhere = accounting.state[rows] != DECODE
        if np.count_nonzero(elsewhere):
            fresh = rows[elsewhere]
            table.first_token[fresh[np.isnan(table.first_token[fresh])]] = now
            accounting.enter(fresh[accounting.state[fresh] == PREFILL], DECODE, now, step=step_id + 1)
        stops = table.stops(rows, tokens)
        ended = (stops | (length >= table.limit[rows])).nonzero()[0]
        end = self._exits.end
        return [
            end(int(rows[i]), FinishReason.STOP, now, step_id + 1, stop_token=int(tokens[i]))
            if stops[i]
            else end(int(rows[i]), FinishReason.LENGTH, now, step_id + 1)
            for i in ended
        ]

    def end_failed(self, rows: Longs, live: Bools, output: StepOutput, step: int, now: float) -> list[Finished]:
        """Ends those of rows int64[n] that something went wrong with, if they are `live` bool[n]."""
        return [
            self._exits.end(int(rows[i]), FinishReason.ERROR, now, step, message=message)
            for i, message in output.failed.items()
            if live[i]
        ]

    def fail(self, batch: Batch, message: str, step: int, now: float) -> list[Finished]:
        """The step came to nothing: ends all that were in it, and those whose copies are lost with it."""
        table, rows = self._table, batch.rows
        table.launched[rows] -= 1
        live = rows[table.phase[rows] != ENDED]
        # What the step should have computed is not there to be found by others.
        table.computed[rows] = np.minimum(table.computed[rows], batch.starts)
        back = np.setdiff1d(self._exits.lose_copies(batch.step_id, now), rows)
        end = self._exits.end
        ends = [end(row, FinishReason.ERROR, now, step, message=message) for row in [*live.tolist(), *back.tolist()]]
        self._exits.settle(np.concatenate([rows, back]), now)
        return ends

    def note_entropy(self, rows: Longs, live: Bools, output: StepOutput) -> None:
        """How sure the first token of some rows was says how long their answers may become."""
        known = [i for i in output.entropy if live[i]]
        if known:
            entropy = np.array([output.entropy[i] for i in known])
            self._output_length.note_entropy(self._table, rows[known], entropy)
            self._output_length.refresh(self._table, rows[known])

    def remember(self, batch: Batch) -> None:
        """The blocks of prompts that this step has filled can be found by others; answers follow when they leave."""
        if self._board.pool.prefixes is None or batch.load.tokens <= batch.load.rows:
            return
        ends = batch.starts + batch.num_tokens
        for i in (batch.num_tokens > 1).nonzero()[0]:
            self._board.remember(int(batch.rows[i]), int(ends[i]))
