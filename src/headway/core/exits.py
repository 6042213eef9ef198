"""Exits: how rows leave, for good when they end or for a while when they lose their place.

A row that leaves keeps its slot and blocks until the last launched step that touches them has been collected.
"""

from __future__ import annotations

import numpy as np

from headway.core.accounting import Accounting, State
from headway.core.batch import Finished, Longs
from headway.core.board import Board
from headway.core.counters import Counters
from headway.core.fairness import TenantService
from headway.core.intake import Intake
from headway.core.output_length import OutputLengthPredictor
from headway.core.request import FinishReason
from headway.core.strategies import Strategies
from headway.core.table import ENDED, LEAVING, RUNNING, Phase, RequestTable, RowSet
from headway.core.timeline import sums


class Exits:
    """Ends and preempts rows (`end`, `preempt`); what they hold comes back when nothing needs it (`settle`)."""

    def __init__(
        self,
        strategies: Strategies,
        table: RequestTable,
        waiting: RowSet,
        board: Board,
        accounting: Accounting,
        output_length: OutputLengthPredictor,
        service: TenantService,
        intake: Intake,
        counters: Counters,
    ) -> None:
        self._strategies = strategies
        self._table = table
        self._waiting = waiting
        self._board = board
        self._host = board.host
        self._accounting = accounting
        self._output_length = output_length
        self._service = service
        self._intake = intake
        self._counters = counters
        self._copied_out: dict[int, list[tuple[int, int]]] = {}

    # -- for good -----------------------------------------------------------------------------------------------------

    def end(
        self,
        row: int,
        reason: FinishReason,
        now: float,
        step: int,
        *,
        stop_token: int | None = None,
        message: str = "",
    ) -> Finished:
        """Marks a row as ended; `settle` frees it. `step`: the first that it has no part in."""
        table = self._table
        timeline = self._accounting.end(row, now, step)
        self._intake.leave(row, now)
        self._output_length.finished(table, row, natural=reason is FinishReason.STOP)
        if table.phase[row] == RUNNING:
            self._board.stop_running(row, ENDED)
        elif table.phase[row] == Phase.WAITING:
            self._waiting.discard(row)
        table.phase[row] = ENDED
        self._host.release(row)
        self._service.ended(row)
        self._counters.num_finished += 1
        return Finished(
            handle=int(table.handle[row]),
            id=table.request(row).id,
            reason=reason,
            stop_token=stop_token,
            prompt_len=int(table.prompt_len[row]),
            output_len=int(table.length[row] - table.prompt_len[row]),
            cached_len=int(table.hits[row]),
            preemptions=int(table.preemptions[row]),
            arrival=float(table.arrival[row]),
            first_token=float(table.first_token[row]),
            finished=now,
            state_times=sums(timeline),
            message=message,
            timeline=timeline,
        )

    # -- for a while --------------------------------------------------------------------------------------------------

    def preempt(self, row: int, now: float) -> None:
        """A row on board loses its place and waits again; with its KV in the host's memory, if it has room there."""
        rows = np.array([row])
        swapped = self._host.holds(row)
        self._counters.num_preemptions += 1
        self._counters.num_swaps += swapped
        self._table.preemptions[row] += 1
        self._board.stop_running(row, LEAVING)
        self._accounting.enter(rows, State.SWAPPED if swapped else State.PREEMPTED, now)
        self.settle(rows, now)

    def unseat(self, now: float) -> int:
        """All on board but the oldest lose their places. Returns how many."""
        rows = self._board.running.rows
        rows = rows[np.argsort(self._table.seq[rows])][1:]
        for row in rows.tolist():
            self.preempt(row, now)
        return len(rows)

    def copying(self, step_id: int, rows: tuple[int, ...]) -> None:
        """A step copies out what these rows have computed: until it is collected, that may still be lost."""
        if rows:
            known = [(row, int(self._table.handle[row])) for row in rows]
            self._copied_out[step_id] = self._copied_out.get(step_id, []) + known

    def copied(self, step_id: int) -> None:
        """The step has been collected."""
        self._copied_out.pop(step_id, None)

    def lose_copies(self, step_id: int, now: float) -> Longs:
        """What a failed step should have copied out is lost: those who wait are computed anew. Returns those who have
        come back with it already."""
        table, back = self._table, []
        for row, handle in self._copied_out.pop(step_id, ()):
            if table.row_of(handle) != row or table.phase[row] == ENDED:
                continue
            if self._host.holds(row) and table.phase[row] == Phase.WAITING:
                self._host.release(row)
                table.swapped[row] = table.cached[row] = 0
                self._accounting.enter(np.array([row]), State.PREEMPTED, now)
            else:
                back.append(row)
        return np.array(back, np.int64)

    # -- what they hold -----------------------------------------------------------------------------------------------

    def settle(self, rows: Longs, now: float) -> None:
        """Rows that have ended or lost their place give everything back, once no launched step touches it."""
        table, board = self._table, self._board
        gone = table.phase[rows] >= LEAVING
        if not np.count_nonzero(gone):
            return
        for row in map(int, rows[gone]):
            if table.phase[row] == ENDED and self._strategies.formation.lingers and table.slot[row] >= 0:
                board.lingering.add(row)
            elif not table.launched[row]:
                self._vacate(row)
        if len(board.lingering) and not len(board.running):
            lingering = board.lingering.rows
            for row in map(int, lingering[table.launched[lingering] == 0].copy()):
                self._vacate(row)
            if not len(board.lingering):
                self._strategies.formation.emptied(now)

    def hold_up(self, ready: Longs) -> bool:
        """Whether rows on board can get no further without what those hold that have ended and linger.

        A padded group has room reserved for all of it; one that boarded under another formation has not.
        """
        board = self._board
        return len(ready) > 0 and len(board.lingering) > 0 and not self._table.launched[board.running.rows].any()

    def dismiss_lingering(self) -> None:
        """Rows that ended give back what they hold, as soon as no launched step touches it."""
        for row in self._board.lingering.rows.tolist():
            self._board.lingering.discard(row)
            if not self._table.launched[row]:
                self._vacate(row)

    def _vacate(self, row: int) -> None:
        table = self._table
        if table.slot[row] >= 0:
            self._board.vacate(row)
        if table.phase[row] == ENDED:
            self._board.forget(row)
            table.free(row)
        else:
            table.phase[row] = Phase.WAITING
            self._waiting.add(row)
