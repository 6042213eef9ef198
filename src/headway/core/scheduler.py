"""The scheduler: a deterministic state machine that decides, step by step, which requests share the next forward pass.

It reads no clock and draws no random number: adds, aborts, times and outputs go in, batches and events come out. A
request has `computed` tokens catching up with its `target`; a step grants some rows some tokens. Prefill, chunks of it,
decode and coming back after preemption are all that one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from headway.core.accounting import WAIT_STEP, Accounting
from headway.core.batch import NO_IDS, NO_SWAPS, Batch, Longs, StepEvents, StepOutput, Wait, merge
from headway.core.board import Board
from headway.core.budget import StepLimits
from headway.core.collect import Collect
from headway.core.config import SchedulerConfig
from headway.core.counters import Counters
from headway.core.decode_step import DecodeStep
from headway.core.exits import Exits
from headway.core.fairness import TenantService
from headway.core.forecast import Forecaster
from headway.core.intake import Intake
from headway.core.kv_cache import BlockPool
from headway.core.launch import Launch
from headway.core.lineup import Lineup
from headway.core.output_length import OutputLengthPredictor
from headway.core.policies import Policy
from headway.core.prefix import PrefixIndex
from headway.core.request import FinishReason, Request
from headway.core.room import NOBODY, Room
from headway.core.step_time import StepTimeModel
from headway.core.strategies import Strategies
from headway.core.swap import HostPool
from headway.core.table import ENDED, RUNNING, Phase, RequestTable, RowSet
from headway.core.timeline import Span
from headway.core.withdrawal import Withdrawal

Event = tuple[Any, ...]
"""What drove the scheduler: ("add", now, request), ("abort", now, handle, reason, stop), ("schedule", now),
("add_late", now, step_id), ("commit", now, step_id, output), ("fail", now, step_id, message), ("no_more", now),
("follow", now, config), ("unseat", now)."""

REFRESH_EVERY = 16
"""Steps after which the output lengths to expect of those on board are looked at again."""


class Scheduler:
    """Who shares the next step. The four choices (formation, policy, budget, preemption) are objects of their own.

    Requests come in by Intake and leave by Exits. Of a step, Lineup says who shares it and Launch makes the batch
    (DecodeStep where nothing is to be decided); for those who come late Withdrawal makes room; Collect reads what came
    of it.
    """

    def __init__(
        self,
        strategies: Strategies,
        pool: BlockPool,
        max_model_len: int,
        *,
        step_time: StepTimeModel | None = None,
        log: Callable[[Event], None] | None = None,
        num_host_blocks: int = 0,
        spare_slots: int = 0,
    ) -> None:
        self.strategies = strategies
        self.pool = pool
        self.max_model_len = max_model_len
        self.table = RequestTable()
        self.accounting = Accounting(self.table)
        self.counters = Counters()
        self.step_time = step_time or StepTimeModel()
        self.output_length = OutputLengthPredictor()
        self.waiting = RowSet()
        self.service = TenantService(self.table)
        self.host = HostPool(num_host_blocks)
        self.board = Board(self.table, pool, strategies.config.seqs, max_model_len, self.host, spare_slots)
        self.log = log
        self.forecaster = Forecaster(self.table, self.waiting, self.board, strategies, self.step_time)
        table, waiting, board, accounting = self.table, self.waiting, self.board, self.accounting
        lengths, counters = self.output_length, self.counters
        intake = Intake(strategies, table, waiting, board, accounting, lengths, self.forecaster, max_model_len)
        exits = Exits(strategies, table, waiting, board, accounting, lengths, self.service, intake, counters)
        room = Room(table, pool, board, strategies, exits.preempt, lengths)
        self._intake, self._exits, self.quotas = intake, exits, intake.quotas
        self._lineup = Lineup(strategies, table, waiting, board, room, accounting, self.step_time)
        self._decode = DecodeStep(strategies, table, board, accounting)
        self._launch = Launch(strategies, table, board, accounting, exits, counters)
        self._withdrawal = Withdrawal(strategies, table, self._lineup, exits, counters)
        self._collect = Collect(table, board, accounting, lengths, exits)
        self._sized_for = strategies.config
        self._step_id = 0

    @classmethod
    def of(
        cls,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        *,
        secret: bytes = b"",
        own: Policy | None = None,
        num_host_blocks: int = 0,
        spare_slots: int = 0,
    ) -> Scheduler:
        """A scheduler of the strategies that `config` names, over so many KV blocks, and so many in the host's memory;
        with so many slots beside those of the requests on board for requests that are leaving.

        `secret` is the key of the prefix index; `own` is a policy to use instead of the one that is named.

        Raises:
            ValueError: as Strategies.of.
        """
        prefixes = PrefixIndex(num_blocks, block_size, secret) if config.prefix_caching else None
        pool = BlockPool(num_blocks, block_size, config.seqs + spare_slots, max_model_len, prefixes)
        model = StepTimeModel()
        return cls(
            Strategies.of(config, model, own),
            pool,
            max_model_len,
            step_time=model,
            num_host_blocks=num_host_blocks,
            spare_slots=spare_slots,
        )

    @property
    def config(self) -> SchedulerConfig:
        return self.strategies.config

    # -- what comes in ------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """A new request joins the queue.

        Raises:
            RequestError: it could never be served: empty, or longer than the model or the KV pool allows.
            Unattainable: it is predicted to miss what it was promised, and such requests are refused.
        """
        if self.log:
            self.log(("add", now, request))
        self._intake.add(request, self._step_id + 1, now)

    def no_more(self, now: float) -> None:
        """Nobody else will come for now: a group that is not full need not wait. The next `add` takes it back."""
        if self.log:
            self.log(("no_more", now))
        self._intake.more = False

    def follow(self, config: SchedulerConfig, now: float) -> None:
        """Other strategies and limits, from the next step on. Requests in flight stay where they are.

        Raises:
            ValueError: a name is unknown, or what memory was sized for at the start would change. All stays as it was.
        """
        config.check_memory(self._sized_for)
        before = self.strategies.policy
        self.strategies.follow(config, self.step_time)
        if self.log:
            self.log(("follow", now, config))
        if self.strategies.policy is not before:
            self._intake.introduce(now)
        self._intake.follow(now)
        if not self.strategies.formation.lingers:
            self._exits.dismiss_lingering()

    def abort(
        self,
        handle: int,
        now: float,
        reason: FinishReason = FinishReason.ABORT,
        stop_token: int | None = None,
        message: str = "",
    ) -> StepEvents | None:
        """Ends a request, wherever it is. Its blocks come back when no launched step touches them.

        Returns its Finished event, or None when there is no such live request.
        """
        if self.log:
            self.log(("abort", now, handle, reason, stop_token))
        row = self.table.row_of(handle)
        if row is None or self.table.phase[row] == ENDED:
            return None
        finished = self._exits.end(row, reason, now, self._step_id + 1, stop_token=stop_token, message=message)
        self._exits.settle(np.array([row]), now)
        return StepEvents(self._step_id, now, NOBODY, NO_IDS, finished=[finished])

    def unseat(self, now: float) -> int:
        """All on board but the oldest lose their places and wait again: for when they keep each other from going on.
        Returns how many."""
        if self.log:
            self.log(("unseat", now))
        return self._exits.unseat(now)

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | Wait:
        """The next batch, or how long to wait. Launch it: from here on its tokens count as computed."""
        if self.log:
            self.log(("schedule", now))
        self.table.step = self._step_id + 1
        self.host.settle()
        batch, until = self._decode_step(now), math.inf
        if batch is None:
            batch, until = self._any_step(now)
        if batch is None:
            return Wait(until, self.accounting.queue_state.label)
        self._step_id = batch.step_id
        self.counters.num_steps += 1
        if self._step_id % REFRESH_EVERY == 0:
            self.output_length.refresh(self.table, self.board.running.rows)
            self.service.sample(self.waiting.rows, now)
        return batch

    def _decode_step(self, now: float) -> Batch | None:
        """The next batch, if everybody decodes and nothing is to be decided."""
        if len(self.waiting):
            return None
        batch = self._decode.launch(self._step_id + 1, now)
        if batch is not None:
            self.counters.num_batched_rows += len(batch.rows)
            self.counters.num_batched_tokens += len(batch.rows)
            self.accounting.queue_waits_for(WAIT_STEP, now)
        return batch

    def _any_step(self, now: float) -> tuple[Batch | None, float]:
        """The next batch by the general rules, and until when the doors are shut where there is none."""
        ready = self._lineup.ready()
        limits = StepLimits(self.config.max_batch_size, self.config.max_num_batched_tokens)
        joining, until = self._lineup.joining(ready, limits, 0, self._intake.more, now)
        if len(self.waiting):
            ready = ready[self.table.phase[ready] == RUNNING]  # some may have had to make way
        batch = self._form(self._step_id + 1, ready, joining, limits, now)
        if batch is None and self._exits.hold_up(ready):
            self._exits.dismiss_lingering()
            batch = self._form(self._step_id + 1, ready[self.table.phase[ready] == RUNNING], NOBODY, limits, now)
        return batch, until

    def add_late(self, batch: Batch, now: float) -> Batch:
        """The prepared batch, which must not be launched yet, with those who have come since, as far as they fit; those
        whom they outrank make way."""
        if self.log:
            self.log(("add_late", now, batch.step_id))
        joining = NOBODY
        if len(self.waiting):
            limits, below = self._withdrawal.limits(batch, now)
            joining, _ = self._lineup.joining(NOBODY, limits, len(batch.admitted), self._intake.more, now)
        if not len(joining):
            self._lineup.explain(now)
            return batch
        late = self._form(batch.step_id, NOBODY, joining, limits, now)
        return batch if late is None else merge(self._withdrawal.withdraw(batch, below, late, now), late)

    def _form(self, step_id: int, ready: Longs, joining: Longs, limits: StepLimits, now: float) -> Batch | None:
        rows, tokens = self._lineup.share(ready, joining, limits, now)
        rows, tokens, admitted, entries = self._lineup.seat(rows, tokens, now)
        self._lineup.explain(now)
        return self._launch.launch(step_id, rows, tokens, admitted, entries, now) if len(rows) else None

    def commit(self, batch: Batch, output: StepOutput, now: float) -> StepEvents:
        """A step has been collected: its tokens are appended, rows end, blocks come back. Steps commit in order."""
        if self.log:
            self.log(("commit", now, batch.step_id, output))
        self.step_time.observe(batch.load, output.elapsed - output.copy_time)
        if batch.swaps is not NO_SWAPS:
            self.step_time.copies.observe(len(batch.swaps), output.copy_time)
            self._exits.copied(batch.step_id)
        table, rows = self.table, batch.rows
        table.launched[rows] -= 1
        phase = table.phase[rows]
        live = phase != ENDED
        ends = self._collect.end_failed(rows, live, output, self._step_id + 1, now) if output.failed else []
        tokens, logprobs = output.token_ids, output.logprobs
        heirs, kept = rows, live
        if len(tokens) < len(rows):
            takes = output.counts > 0
            heirs, kept = rows[takes], live[takes]
        if np.count_nonzero(kept) < len(kept):  # tokens past the end of a request that has ended meanwhile
            heirs, tokens = heirs[kept], tokens[kept]
            if logprobs is not None:
                logprobs = [entry for entry, k in zip(logprobs, kept, strict=True) if k]
        if output.entropy:
            self._collect.note_entropy(rows, live, output)
        ends += self._collect.append(heirs, tokens, batch.step_id, now)
        self._collect.remember(batch)
        handles = table.handle[heirs]
        if ends or np.count_nonzero(phase == RUNNING) < len(rows):
            self._exits.settle(rows, now)
        return StepEvents(batch.step_id, now, handles, tokens, logprobs, ends)

    def fail(self, batch: Batch, message: str, now: float) -> StepEvents:
        """A launched step came to nothing: the requests in it end with an error, all others go on."""
        if self.log:
            self.log(("fail", now, batch.step_id, message))
        ends = self._collect.fail(batch, message, self._step_id + 1, now)
        return StepEvents(batch.step_id, now, NOBODY, NO_IDS, finished=ends)

    # -- what others may ask ------------------------------------------------------------------------------------------

    @property
    def running(self) -> RowSet:
        """The rows on board."""
        return self.board.running

    @property
    def kv_fragmentation(self) -> float:
        """Of the tokens that the blocks of those on board have room for, the share that is empty."""
        return self.board.fragmentation

    def tenant_counters(self) -> dict[str, float]:
        """The policy's account of those tenants that the configuration names; empty where it keeps none."""
        counters = self.strategies.policy.counters()
        return {} if counters is None else self.service.named(counters, self.config.tenants)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, and those that their tenant's limit does not let into it."""
        return len(self.waiting) + len(self.quotas)

    def waiting_by_reason(self) -> dict[str, int]:
        """How many requests wait for what."""
        rows = self.waiting.rows
        return self.accounting.reasons(np.append(rows, self.quotas.rows).astype(np.int64) if len(self.quotas) else rows)

    def paused_by_reason(self) -> dict[str, int]:
        """How many requests on board wait for what."""
        return self.accounting.paused(self.running.rows)

    def timeline(self, handle: int, now: float) -> list[Span] | None:
        """Where the time of a live request has gone up to now; None when there is no such request."""
        row = self.table.row_of(handle)
        if row is None or self.table.phase[row] == ENDED:
            return None
        return self.accounting.timeline(row, now, self._step_id + 1)

    def check(self) -> None:
        """Raises AssertionError where rows, slots and blocks do not add up. For tests and the watchdog."""
        self.pool.check()
        self.board.check()
        self.accounting.check()
        self.quotas.check()
        waiting = self.waiting.rows.tolist() + self.quotas.rows
        assert sorted(waiting) == np.flatnonzero(self.table.phase == Phase.WAITING).tolist(), "the queue is wrong"
