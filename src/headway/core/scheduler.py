"""The scheduler: a deterministic state machine that decides, step by step, which requests share the next forward pass.

It reads no clock and draws no random number: adds, aborts, times and outputs go in, batches and events come out. A
request has `computed` tokens catching up with its `target`; a step grants some rows some tokens. Prefill, chunks of it,
decode and coming back after preemption are all that one rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.core.accounting import DECODE, PREFILL, WAIT_STEP, Accounting, State
from headway.core.batch import Batch, Bools, Finished, Ints, Longs, StepEvents, StepOutput, Wait, merge
from headway.core.board import Board
from headway.core.budget import StepLimits
from headway.core.config import SchedulerConfig
from headway.core.forecast import Forecaster
from headway.core.kv_cache import BlockEntries, BlockPool
from headway.core.lineup import Lineup
from headway.core.output_length import OutputLengthPredictor
from headway.core.policies import Policy
from headway.core.prefix import PrefixIndex
from headway.core.request import NO_SLO, FinishReason, Request, RequestError, Unattainable
from headway.core.room import NOBODY, Room
from headway.core.step_time import StepTimeModel
from headway.core.strategies import Strategies
from headway.core.table import ENDED, LEAVING, RUNNING, Phase, RequestTable, Rows, RowSet

Event = tuple[Any, ...]
"""What drove the scheduler: ("add", now, request), ("abort", now, handle, reason, stop), ("schedule", now),
("add_late", now, step_id), ("commit", now, step_id, output), ("fail", now, step_id, message), ("no_more", now),
("follow", now, config)."""

REFRESH_EVERY = 16
"""Steps after which the output lengths to expect of those on board are looked at again."""
NO_TOKENS = np.zeros(0, np.int32)


@dataclass(slots=True)
class Counters:
    """Totals since the start; all but num_steps and num_preemptions in tokens or rows."""

    num_steps: int = 0
    num_batched_tokens: int = 0
    num_batched_rows: int = 0
    num_pad_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_finished: int = 0


class Scheduler:
    """Who shares the next step. The four choices (formation, policy, budget, preemption) are objects of their own.

    A row that has ended or lost its place keeps its slot and blocks until the last launched step that touches them has
    been collected.
    """

    def __init__(
        self,
        strategies: Strategies,
        pool: BlockPool,
        max_model_len: int,
        *,
        step_time: StepTimeModel | None = None,
        log: Callable[[Event], None] | None = None,
    ) -> None:
        self.strategies = strategies
        self.pool = pool
        self.max_model_len = max_model_len
        self.table = RequestTable()
        self.accounting = Accounting(self.table.capacity)
        self.counters = Counters()
        self.step_time = step_time or StepTimeModel()
        self.output_length = OutputLengthPredictor()
        self.waiting = RowSet()
        self.board = Board(self.table, pool, strategies.config.seqs, max_model_len)
        self.log = log
        room = Room(self.table, pool, self.board, strategies, self._preempt)
        self.forecaster = Forecaster(self.table, self.waiting, self.board, strategies, self.step_time)
        self._lineup = Lineup(strategies, self.table, self.waiting, self.board, room, self.accounting)
        self._sized_for = strategies.config
        self._step_id = 0
        self._more = True

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
    ) -> Scheduler:
        """A scheduler of the strategies that `config` names, over so many KV blocks.

        `secret` is the key of the prefix index; `own` is a policy to use instead of the one that is named.

        Raises:
            ValueError: as Strategies.of.
        """
        prefixes = PrefixIndex(num_blocks, block_size, secret) if config.prefix_caching else None
        pool = BlockPool(num_blocks, block_size, config.seqs, max_model_len, prefixes)
        model = StepTimeModel()
        return cls(Strategies.of(config, model, own), pool, max_model_len, step_time=model)

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
        prompt_len = len(request.prompt_token_ids)
        limit = self.max_model_len
        if request.params.max_tokens is not None:
            limit = min(limit, prompt_len + request.params.max_tokens)
        self._check_fits(prompt_len, limit)
        row = self.table.add(request, limit, self.config.depth)
        self.accounting.arrive(row, request.arrival, now)
        self.waiting.add(row)
        self.board.look_up(row)  # so that policies see uncached work
        self.output_length.begin(self.table, np.array([row]))
        self.strategies.policy.arrived(Rows(self.table, np.array([row]), now), now)
        if self.config.admission != "accept":
            self._judge(row, request, now)
        self._more = True
        self.strategies.formation.arrived(request.arrival)

    def _judge(self, row: int, request: Request, now: float) -> None:
        """Whoever is predicted to miss what it was promised is relegated, or refused and holds nothing."""
        forecast = self.forecaster.of(row, now) if request.slo != NO_SLO else None
        if forecast is not None and not forecast.keeps(Rows(self.table, np.array([row]), now)):
            if self.config.admission == "refuse":
                self.strategies.policy.ended(Rows(self.table, np.array([row]), now), now)
                self.waiting.discard(row)
                self.board.forget(row)
                self.table.free(row)
                raise Unattainable(forecast.complaint(request.slo), forecast.wait)
            self.table.relegated[row] = 1
            return
        self.forecaster.accepted(row)

    def no_more(self, now: float) -> None:
        """Nobody else will come for now: a group that is not full need not wait. The next `add` takes it back."""
        if self.log:
            self.log(("no_more", now))
        self._more = False

    def follow(self, config: SchedulerConfig, now: float) -> None:
        """Other strategies and limits, from the next step on. Requests in flight stay where they are.

        Raises:
            ValueError: a name is unknown, or what memory was sized for at the start would change. All stays as it was.
        """
        sized = self._sized_for
        for name in ("seqs", "prefix_caching"):
            if getattr(config, name) != getattr(sized, name):
                raise ValueError(f"{name} was set to {getattr(sized, name)} at the start and cannot change")
        if config.max_num_batched_tokens > sized.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens cannot be {config.max_num_batched_tokens}: memory was sized for "
                f"{sized.max_num_batched_tokens} at the start"
            )
        before = self.strategies.policy
        self.strategies.follow(config, self.step_time)
        if self.log:
            self.log(("follow", now, config))
        if self.strategies.policy is not before:
            live = np.flatnonzero((self.table.phase != Phase.FREE) & (self.table.phase != ENDED))
            if len(live):
                self.strategies.policy.arrived(Rows(self.table, live[np.argsort(self.table.seq[live])], now), now)
        if not self.strategies.formation.lingers:
            self._dismiss_lingering()

    def _check_fits(self, prompt_len: int, limit: int) -> None:
        if prompt_len == 0:
            raise RequestError("the prompt is empty: send at least one token", param="prompt")
        if prompt_len >= self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, but at most {self.max_model_len - 1} leave room for an answer "
                f"(max_model_len is {self.max_model_len})",
                param="prompt",
                code="context_length_exceeded",
            )
        capacity = self.pool.num_blocks * self.pool.block_size
        if limit - 1 > capacity:
            raise RequestError(
                f"the request may grow to {limit} tokens, but the KV pool holds only {capacity}: "
                "shorten it, lower max_tokens or raise --kv-cache-memory",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def abort(
        self,
        handle: int,
        now: float,
        reason: FinishReason = FinishReason.ABORT,
        stop_token: int | None = None,
    ) -> StepEvents | None:
        """Ends a request, wherever it is. Its blocks come back when no launched step touches them.

        Returns its Finished event, or None when there is no such live request.
        """
        if self.log:
            self.log(("abort", now, handle, reason, stop_token))
        row = self.table.row_of(handle)
        if row is None or self.table.phase[row] == ENDED:
            return None
        finished = self._end(row, reason, now, stop_token=stop_token)
        self._settle(np.array([row]), now)
        return StepEvents(self._step_id, now, NOBODY, NO_TOKENS, finished=[finished])

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | Wait:
        """The next batch, or how long to wait. Launch it: from here on its tokens count as computed."""
        if self.log:
            self.log(("schedule", now))
        self.table.step = self._step_id + 1
        ready = self._lineup.ready()
        limits = StepLimits(self.config.max_batch_size, self.config.max_num_batched_tokens)
        joining, until = self._lineup.joining(ready, limits, 0, self._more, now)
        if len(self.waiting):
            ready = ready[self.table.phase[ready] == RUNNING]  # some may have had to make way
        batch = self._form(self._step_id + 1, ready, joining, limits, now)
        if batch is None and self._stuck(ready):
            self._dismiss_lingering()
            batch = self._form(self._step_id + 1, ready[self.table.phase[ready] == RUNNING], NOBODY, limits, now)
        if batch is None:
            return Wait(until, self.accounting.queue_state.label)
        self._step_id = batch.step_id
        self.counters.num_steps += 1
        if self._step_id % REFRESH_EVERY == 0:
            self.output_length.refresh(self.table, self.board.running.rows)
        return batch

    def add_late(self, batch: Batch, now: float) -> Batch:
        """The prepared batch, which must not be launched yet, with those who have come since, as far as they fit."""
        if self.log:
            self.log(("add_late", now, batch.step_id))
        limits = StepLimits(
            self.config.max_batch_size - len(batch.rows),
            self.config.max_num_batched_tokens - batch.total_tokens,
            batch.load,
        )
        joining, _ = self._lineup.joining(NOBODY, limits, len(batch.admitted), self._more, now)
        if not len(joining):
            return batch
        late = self._form(batch.step_id, NOBODY, joining, limits, now)
        return batch if late is None else merge(batch, late)

    def _form(self, step_id: int, ready: Longs, joining: Longs, limits: StepLimits, now: float) -> Batch | None:
        rows, tokens = self._lineup.share(ready, joining, limits, now)
        rows, tokens, admitted, entries = self._lineup.seat(rows, tokens, now)
        if not len(self.waiting):
            self.accounting.queue_waits_for(WAIT_STEP, now)
        return self._launch(step_id, rows, tokens, admitted, entries, now) if len(rows) else None

    def _stuck(self, ready: Longs) -> bool:
        """Whether rows on board can get no further without what those hold that have ended and linger.

        A padded group has room reserved for all of it; one that boarded under another formation has not.
        """
        board = self.board
        return len(ready) > 0 and len(board.lingering) > 0 and not self.table.launched[board.running.rows].any()

    def _dismiss_lingering(self) -> None:
        """Rows that ended give back what they hold, as soon as no launched step touches it."""
        for row in self.board.lingering.rows.tolist():
            self.board.lingering.discard(row)
            if not self.table.launched[row]:
                self._vacate(row)

    def _preempt(self, row: int, now: float) -> None:
        rows = np.array([row])
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += int(self.table.computed[row])
        self.table.preemptions[row] += 1
        self.board.stop_running(row, LEAVING)
        self.accounting.enter(rows, State.PREEMPTED, now)
        self._settle(rows, now)

    # -- launching and committing -------------------------------------------------------------------------------------

    def _launch(
        self, step_id: int, rows: Longs, tokens: Ints, admitted: Longs, entries: BlockEntries, now: float
    ) -> Batch:
        table, counters = self.table, self.counters
        self._note_computing(rows, table.computed[rows], now)
        self.strategies.policy.served(Rows(table, rows, now), tokens, now)
        if len(admitted):
            counters.num_prefix_queries += int(table.target[admitted].sum())
            counters.num_prefix_hits += int(table.computed[admitted].sum())
        counters.num_batched_rows += len(rows)
        lingering = self.board.lingering.rows
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
            pad_tokens=self.strategies.formation.pad(tokens),
            admitted=tuple(self.board.admission(int(row)) for row in admitted),
            block_slots=entries[0],
            block_index=entries[1],
            block_ids=entries[2],
        )
        padding = int(batch.pad_tokens.sum()) if self.strategies.formation.lingers else 0
        counters.num_pad_tokens += padding
        counters.num_batched_tokens += int(batch.load.tokens) - padding
        return batch

    def _note_computing(self, rows: Longs, starts: Ints, now: float) -> None:
        """Rows of the step prefill until their first token is there (commit says so), and decode from then on."""
        table, accounting = self.table, self.accounting
        elsewhere = accounting.state[rows] != DECODE
        if not np.count_nonzero(elsewhere):
            return  # who decodes goes on decoding
        rows, starts = rows[elsewhere], starts[elsewhere]
        prefills = (starts < table.length[rows] - 1) | np.isnan(table.first_token[rows])
        state = np.where(prefills, PREFILL, DECODE).astype(np.int8)
        changed = (accounting.state[rows] != state) | accounting.queued(rows)
        accounting.enter(rows[changed], state[changed], now)

    def commit(self, batch: Batch, output: StepOutput, now: float) -> StepEvents:
        """A step has been collected: its tokens are appended, rows end, blocks come back. Steps commit in order."""
        if self.log:
            self.log(("commit", now, batch.step_id, output))
        self.step_time.observe(batch.load, output.elapsed)
        table, rows = self.table, batch.rows
        table.launched[rows] -= 1
        live = table.phase[rows] != ENDED
        ends = [
            self._end(int(rows[i]), FinishReason.ERROR, now, message=message)
            for i, message in output.failed.items()
            if live[i]
        ]
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
            self._note_entropy(rows, live, output)
        ends += self._append(heirs, tokens, now)
        self._remember(batch)
        handles = table.handle[heirs]
        self._settle(rows, now)
        return StepEvents(batch.step_id, now, handles, tokens, logprobs, ends)

    def _note_entropy(self, rows: Longs, live: Bools, output: StepOutput) -> None:
        """How sure the first token of some rows was says how long their answers may become."""
        known = [i for i in output.entropy if live[i]]
        if known:
            entropy = np.array([output.entropy[i] for i in known])
            self.output_length.note_entropy(self.table, rows[known], entropy)
            self.output_length.refresh(self.table, rows[known])

    def _remember(self, batch: Batch) -> None:
        """The blocks of prompts that this step has filled can be found by others; answers follow when they leave."""
        if self.pool.prefixes is None or batch.load.tokens <= batch.load.rows:
            return
        ends = batch.starts + batch.num_tokens
        for i in (batch.num_tokens > 1).nonzero()[0]:
            self.board.remember(int(batch.rows[i]), int(ends[i]))

    def _append(self, rows: Longs, tokens: Ints, now: float) -> list[Finished]:
        """One new token for each of rows; returns the ends that follow from them."""
        table, accounting = self.table, self.accounting
        self.board.append(rows, tokens)
        elsewhere = accounting.state[rows] != DECODE
        if np.count_nonzero(elsewhere):
            fresh = rows[elsewhere]
            table.first_token[fresh[np.isnan(table.first_token[fresh])]] = now
            accounting.enter(fresh[accounting.state[fresh] == PREFILL], DECODE, now)
        stops = table.stops(rows, tokens)
        ended = (stops | (table.length[rows] >= table.limit[rows])).nonzero()[0]
        return [
            self._end(int(rows[i]), FinishReason.STOP, now, stop_token=int(tokens[i]))
            if stops[i]
            else self._end(int(rows[i]), FinishReason.LENGTH, now)
            for i in ended
        ]

    def fail(self, batch: Batch, message: str, now: float) -> StepEvents:
        """A launched step came to nothing: the requests in it end with an error, all others go on."""
        if self.log:
            self.log(("fail", now, batch.step_id, message))
        table, rows = self.table, batch.rows
        table.launched[rows] -= 1
        live = rows[table.phase[rows] != ENDED]
        ends = [self._end(int(row), FinishReason.ERROR, now, message=message) for row in live]
        self._settle(rows, now)
        return StepEvents(batch.step_id, now, NOBODY, NO_TOKENS, finished=ends)

    def _end(
        self, row: int, reason: FinishReason, now: float, *, stop_token: int | None = None, message: str = ""
    ) -> Finished:
        """Marks a row as ended; `_settle` frees it."""
        table = self.table
        self.strategies.policy.ended(Rows(table, np.array([row]), now), now)
        self.output_length.finished(table, row, natural=reason is FinishReason.STOP)
        if table.phase[row] == RUNNING:
            self.board.stop_running(row, ENDED)
        elif table.phase[row] == Phase.WAITING:
            self.waiting.discard(row)
        table.phase[row] = ENDED
        self.counters.num_finished += 1
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
            state_times=self.accounting.times(row, now),
            message=message,
        )

    def _settle(self, rows: Longs, now: float) -> None:
        """Rows that have ended or lost their place give everything back, once no launched step touches it."""
        table, board = self.table, self.board
        gone = table.phase[rows] >= LEAVING
        if not np.count_nonzero(gone):
            return
        for row in map(int, rows[gone]):
            if table.phase[row] == ENDED and self.strategies.formation.lingers and table.slot[row] >= 0:
                board.lingering.add(row)
            elif not table.launched[row]:
                self._vacate(row)
        if len(board.lingering) and not len(board.running):
            lingering = board.lingering.rows
            for row in map(int, lingering[table.launched[lingering] == 0].copy()):
                self._vacate(row)
            if not len(board.lingering):
                self.strategies.formation.emptied(now)

    def _vacate(self, row: int) -> None:
        table = self.table
        if table.slot[row] >= 0:
            self.board.vacate(row)
        if table.phase[row] == ENDED:
            self.board.forget(row)
            table.free(row)
        else:
            table.phase[row] = Phase.WAITING
            self.waiting.add(row)

    # -- what others may ask ------------------------------------------------------------------------------------------

    @property
    def running(self) -> RowSet:
        """The rows on board."""
        return self.board.running

    @property
    def kv_fragmentation(self) -> float:
        """Of the tokens that the blocks of those on board have room for, the share that is empty."""
        rows = self.running.rows
        room = int(self.table.blocks[rows].sum()) * self.pool.block_size
        return 1.0 - int(self.table.computed[rows].sum()) / room if room else 0.0

    def waiting_by_reason(self) -> dict[str, int]:
        """How many requests of the queue wait for what."""
        rows = self.waiting.rows
        fresh = int(np.count_nonzero(self.accounting.queued(rows)))
        reasons = {State.PREEMPTED.label: len(rows) - fresh, self.accounting.queue_state.label: fresh}
        return {reason: count for reason, count in reasons.items() if count}

    def check(self) -> None:
        """Raises AssertionError where rows, slots and blocks do not add up. For tests and the watchdog."""
        self.pool.check()
        self.board.check()
        waiting = np.flatnonzero(self.table.phase == Phase.WAITING)
        assert sorted(self.waiting.rows.tolist()) == waiting.tolist(), "the queue and the table differ"
