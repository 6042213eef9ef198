"""Intake: how requests come in. What can never be served is turned away, a tenant's limit holds some outside, and a
promise that would be missed is relegated or refused; all others join the queue."""

from __future__ import annotations

import numpy as np

from headway.core.accounting import Accounting, State
from headway.core.board import Board
from headway.core.forecast import Forecaster
from headway.core.output_length import OutputLengthPredictor
from headway.core.request import NO_SLO, Request, RequestError, Unattainable
from headway.core.strategies import Strategies
from headway.core.table import ENDED, Phase, RequestTable, Rows, RowSet
from headway.core.tenants import Quotas


class Intake:
    """The way into the queue. `quotas`: the rows that their tenant's limit holds. `more`: whether others may come for
    now, so that a group that is not full had better wait."""

    def __init__(
        self,
        strategies: Strategies,
        table: RequestTable,
        waiting: RowSet,
        board: Board,
        accounting: Accounting,
        output_length: OutputLengthPredictor,
        forecaster: Forecaster,
        max_model_len: int,
    ) -> None:
        self._strategies = strategies
        self._table = table
        self._waiting = waiting
        self._board = board
        self._accounting = accounting
        self._output_length = output_length
        self._forecaster = forecaster
        self._max_model_len = max_model_len
        self.quotas = Quotas(table, strategies)
        self.more = True

    def add(self, request: Request, step: int, now: float) -> None:
        """A new request joins the queue, for `step` at the earliest. Raises as Scheduler.add."""
        prompt_len = len(request.prompt_token_ids)
        limit = self._max_model_len
        if request.params.max_tokens is not None:
            limit = min(limit, prompt_len + request.params.max_tokens)
        self._check_fits(prompt_len, limit)
        config, accounting = self._strategies.config, self._accounting
        row = self._table.add(request, limit, config.depth)
        self._table.step = step
        self.more = True
        if self.quotas.enter(row):
            takes_turns = self._enqueue(row, request.arrival, now)
            if config.admission != "accept":
                self._judge(row, request, now)
            accounting.arrive(row, request.arrival, now, takes_turns=takes_turns)
        else:
            accounting.arrive(row, request.arrival, now)
            accounting.hold(row, State.WAIT_QUOTA, now, "in_flight")

    def _check_fits(self, prompt_len: int, limit: int) -> None:
        if prompt_len == 0:
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        if prompt_len >= self._max_model_len:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, but at most {self._max_model_len - 1} leave room for an answer "
                f"(max_model_len is {self._max_model_len})",
                param="prompt",
                code="context_length_exceeded",
            )
        pool = self._board.pool
        capacity = pool.num_blocks * pool.block_size
        if limit - 1 > capacity:
            raise RequestError(
                f"the request may grow to {limit} tokens, but the KV pool holds only {capacity}: "
                "shorten it, lower max_tokens or raise --kv-cache-memory",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def _enqueue(self, row: int, arrival: float, now: float) -> bool:
        """A row joins the queue for the first time, having come there at `arrival`. Returns whether it takes turns."""
        self._waiting.add(row)
        self._board.look_up(row)  # so that policies see uncached work
        self._output_length.begin(self._table, np.array([row]))
        rows = Rows(self._table, np.array([row]), now)
        self._strategies.policy.arrived(rows, now)
        self._strategies.formation.arrived(arrival)
        turns = self._strategies.policy.takes_turns(rows)
        return turns is not None and bool(turns[0])

    def _judge(self, row: int, request: Request, now: float) -> None:
        """Whoever is predicted to miss what it was promised is relegated, or refused and holds nothing."""
        forecast = self._forecaster.of(row, now) if request.slo != NO_SLO else None
        if forecast is None or forecast.keeps(Rows(self._table, np.array([row]), now)):
            self._forecaster.accepted(row)
        elif self._strategies.config.admission == "refuse":
            self._turn_away(row, now)
            raise Unattainable(forecast.complaint(request.slo), forecast.wait)
        else:
            self._table.relegated[row] = 1

    def _turn_away(self, row: int, now: float) -> None:
        """Undoes all that a row of the queue has done by coming."""
        self._strategies.policy.ended(Rows(self._table, np.array([row]), now), now)
        self._waiting.discard(row)
        self._board.forget(row)
        self._release(self.quotas.leave(row), now)
        self._table.free(row)

    def leave(self, row: int, now: float) -> None:
        """A row that has come in ends: whom it kept outside joins the queue."""
        held = row in self.quotas
        self._release(self.quotas.leave(row), now)  # first: whose next request takes over has not been idle
        if not held:
            self._strategies.policy.ended(Rows(self._table, np.array([row]), now), now)

    def follow(self, now: float) -> None:
        """Other limits: whom they let in now joins the queue."""
        self._release(self.quotas.release(), now)

    def _release(self, rows: list[int], now: float) -> None:
        """Rows that their tenant's limit has held join the queue."""
        for row in rows:
            self._table.renumber(row)
            self._accounting.release(row, now, takes_turns=self._enqueue(row, now, now))
            if self._strategies.config.admission != "accept":
                self._forecaster.accepted(row)

    def introduce(self, now: float) -> None:
        """Another policy: it is told of all in flight, in the order in which they came."""
        table, policy = self._table, self._strategies.policy
        live = np.flatnonzero((table.phase != Phase.FREE) & (table.phase != ENDED))
        live = np.setdiff1d(live, self.quotas.rows)
        if len(live):
            rows = Rows(table, live[np.argsort(table.seq[live])], now)
            policy.arrived(rows, now)
            turns = policy.takes_turns(rows)
            self._accounting.regroup(rows.index, np.zeros(len(rows), np.bool_) if turns is None else turns, now)
