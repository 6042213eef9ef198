"""The scheduler: a deterministic state machine that decides, step by step, which requests share the next forward pass.

It reads no clock and draws no random number: adds, aborts, times and outputs go in, batches and events come out. A
request has `computed` tokens catching up with its `target`; a step grants some rows some tokens. Prefill, chunks of it,
decode and coming back after preemption are all that one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.core.accounting import Accounting, State
from headway.core.batch import Admission, Batch, Bools, Finished, Ints, Logprobs, StepEvents, StepOutput, Wait
from headway.core.budget import Budget, DecodeFirst
from headway.core.config import SchedulerConfig
from headway.core.formation import Continuous, Formation
from headway.core.kv_cache import BlockEntries, BlockPool, blocks_for
from headway.core.policies import Fcfs, Policy
from headway.core.preemption import LastInOrder, Preemption
from headway.core.request import FinishReason, Request, RequestError
from headway.core.table import Phase, RequestTable, Rows, RowSet

Event = tuple[Any, ...]
"""What drove the scheduler: ("add", now, request), ("abort", now, handle, reason, stop), ("schedule", now),
("commit", now, step_id, output), ("fail", now, step_id, message)."""

NO_ROWS = np.zeros(0, np.int32)
NO_ENTRIES: BlockEntries = (NO_ROWS, NO_ROWS, NO_ROWS)


@dataclass(slots=True)
class Counters:
    """Totals since the start; all but num_steps and num_preemptions in tokens or rows."""

    num_steps: int = 0
    num_batched_tokens: int = 0
    num_batched_rows: int = 0
    num_pad_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_finished: int = 0


class Scheduler:
    """Who shares the next step. The four choices (formation, policy, budget, preemption) are objects of their own.

    A row that has ended or lost its place keeps its slot and blocks until the last launched step that touches them has
    been collected.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        max_model_len: int,
        *,
        formation: Formation | None = None,
        policy: Policy | None = None,
        budget: Budget | None = None,
        preemption: Preemption | None = None,
        log: Callable[[Event], None] | None = None,
    ) -> None:
        self.config = config
        self.pool = pool
        self.max_model_len = max_model_len
        self.formation = formation or Continuous()
        self.policy = policy or Fcfs()
        self.budget = budget or DecodeFirst(config)
        self.preemption = preemption or LastInOrder()
        self.table = RequestTable()
        self.accounting = Accounting(self.table.capacity)
        self.counters = Counters()
        self.waiting = RowSet()
        self.running = RowSet(config.seqs)
        self.log = log
        self._tokens = np.zeros((config.seqs, max_model_len + 1), np.int32)
        self._saved: dict[int, Ints] = {}
        self._free_slots = list(range(config.seqs - 1, -1, -1))
        self._leaving_blocks = 0
        self._step_id = 0
        self._watermark = math.ceil(0.01 * pool.num_blocks)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """A new request joins the queue.

        Raises:
            RequestError: it could never be served: empty, or longer than the model or the KV pool allows.
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
        if row is None or self.table.phase[row] == Phase.ENDED:
            return None
        finished = self._end(row, reason, now, stop_token=stop_token)
        self._settle(np.array([row], np.int32), now)
        return StepEvents(self._step_id, now, NO_ROWS.astype(np.int64), NO_ROWS, finished=[finished])

    # -- one step -----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Batch | Wait:
        """The next batch, or how long to wait. Launch it: from here on its tokens count as computed."""
        if self.log:
            self.log(("schedule", now))
        ready = self._ready()
        joining, until = self._joining(now)
        rows = self._line_up(ready, joining, now)
        tokens = self.budget.grant(Rows(self.table, rows, now), now)
        granted = tokens > 0
        full = np.count_nonzero(granted) >= self.config.max_batch_size
        self._note_waits(rows[~granted], State.WAIT_ROW if full else State.WAIT_BUDGET, now)
        rows, tokens, admitted, entries = self._find_room(rows[granted], tokens[granted], now)
        if not len(self.waiting):
            self.accounting.queue_waits_for(State.WAIT_STEP, now)
        if not len(rows):
            return Wait(until, self.accounting.queue_state.label)
        return self._launch(rows, tokens, admitted, entries, now)

    def _ready(self) -> Ints:
        """Rows on board that may be launched once more and still have something to compute."""
        table, rows = self.table, self.running.rows
        may = (table.launched[rows] < table.chain[rows]) & (table.target[rows] < table.limit[rows])
        return rows[may]

    def _joining(self, now: float) -> tuple[Ints, float]:
        """The rows of the queue that formation and slots let in, best first; and until when the doors are shut."""
        if not len(self.waiting):
            return NO_ROWS, math.inf
        queue = Rows(self.table, self.waiting.rows, now)
        allowed = self.formation.may_join(queue, Rows(self.table, self.running.rows, now), now)
        if isinstance(allowed, Wait):
            self.accounting.queue_waits_for(State.WAIT_WINDOW, now)
            return NO_ROWS, allowed.until
        burst = self.config.burst_size or allowed
        count = min(allowed, burst, len(self._free_slots))
        if count < len(self.waiting):
            self.accounting.queue_waits_for(State.WAIT_ROW, now)
        if count == 0:
            return NO_ROWS, math.inf
        return self._leaders(queue, count, now), math.inf

    def _leaders(self, queue: Rows, count: int, now: float) -> Ints:
        """The `count` rows of lowest score, ties by age. A partial sort: the queue may be very long."""
        score = self.policy.score(queue, now)
        if count < len(score):
            among = np.flatnonzero(score <= np.partition(score, count - 1)[count - 1])
        else:
            among = np.arange(len(score))
        order = np.lexsort((queue.seq[among], score[among]))
        rows: Ints = queue.index[among[order[:count]]]
        return rows

    def _line_up(self, ready: Ints, joining: Ints, now: float) -> Ints:
        """All candidates of the step in the policy's order (in any, where each gets its one token anyway)."""
        if not len(joining) and len(ready) <= self.config.max_batch_size:
            table = self.table
            if (table.target[ready] - table.computed[ready] == 1).all():
                return ready
        return self._in_order(np.concatenate([ready, joining]), now)

    def _in_order(self, rows: Ints, now: float) -> Ints:
        view = Rows(self.table, rows, now)
        return rows[np.lexsort((view.seq, self.policy.score(view, now)))]

    # -- room in the KV pool ------------------------------------------------------------------------------------------

    def _find_room(self, rows: Ints, tokens: Ints, now: float) -> tuple[Ints, Ints, Ints, BlockEntries]:
        """Blocks for the granted rows. Who is on board is provided for first, then the queue in order.

        Returns the rows and tokens that remain, the newly admitted among the rows, and the new block table entries.
        """
        table, pool = self.table, self.pool
        need = blocks_for(table.computed[rows] + tokens, pool.block_size) - table.blocks[rows]
        on_board = table.phase[rows] == Phase.RUNNING
        pressed = int(need[on_board].sum()) > pool.available
        keep = on_board.copy()
        if pressed:
            keep[on_board] = self._make_room(rows[on_board], need[on_board], now)
            self._note_waits(rows[on_board & ~keep], State.WAIT_BLOCKS, now)
        if not on_board.all():
            free = 0 if pressed else pool.available - int(need[on_board].sum())
            keep[~on_board] = self._admit(rows[~on_board], need[~on_board], free, now)
        admitted = rows[keep & ~on_board]
        if not keep.all():
            rows, tokens, need = rows[keep], tokens[keep], need[keep]
        if not need.any():
            return rows, tokens, admitted, NO_ENTRIES
        grows = need > 0
        growing, counts = rows[grows], need[grows]
        table.blocks[growing] += counts
        return rows, tokens, admitted, pool.extend(table.slot[growing], counts)

    def _admit(self, rows: Ints, need: Ints, free: int, now: float) -> Bools:
        """Takes rows of the queue on board, in order, while all that is known of them fits beside the promises made.

        A prompt that is computed in chunks is promised the blocks of all of it, so that prompts never evict each other.
        """
        table, block_size = self.table, self.pool.block_size
        whole = blocks_for(table.target[rows], block_size)
        board = self.running.rows
        debts = blocks_for(table.target[board], block_size) - table.blocks[board]
        headroom = self._watermark if len(board) else 0
        spare = free - headroom - int(np.maximum(debts, 0).sum())
        fits = np.cumsum(whole) <= spare
        if len(rows) and not len(board) and whole[0] <= free:
            fits[0] = True
        for row in rows[fits]:
            self._take_on_board(int(row))
        if not fits.all():
            self.accounting.queue_waits_for(State.WAIT_BLOCKS, now)
        return fits

    def _take_on_board(self, row: int) -> None:
        table = self.table
        slot = self._free_slots.pop()
        table.slot[row] = slot
        table.phase[row] = Phase.RUNNING
        known = self._saved.pop(row, None)
        tokens = table.request(row).prompt_token_ids if known is None else known
        self._tokens[slot, : len(tokens)] = tokens
        self.waiting.discard(row)
        self.running.add(row)

    def _make_room(self, rows: Ints, need: Ints, now: float) -> Bools:
        """Blocks are short: serves rows in order, evicting later ones where that makes them fit (bool[n])."""
        table = self.table
        board = self._in_order(self.running.rows, now)
        place = {int(row): position for position, row in enumerate(board)}
        served = np.zeros(len(rows), np.bool_)
        free, coming = self.pool.available, self._leaving_blocks
        for i in sorted(range(len(rows)), key=lambda i: place[int(rows[i])]):
            row = rows[i]
            if table.phase[row] != Phase.RUNNING:
                continue  # it has just been evicted itself
            wanted = int(need[i])
            if wanted > free:
                later = board[place[int(row)] + 1 :]
                later = later[table.phase[later] == Phase.RUNNING]
                gained_now, gained_later = self._evict(later, wanted - free - coming, now)
                free += gained_now
                coming += gained_later
            if wanted <= free:
                free -= wanted
                served[i] = True
            else:  # it fits once a step is collected, or never: nobody behind it may take what there is
                coming = max(0, coming - (wanted - free))
                free = 0
        return served

    def _evict(self, candidates: Ints, wanted: int, now: float) -> tuple[int, int]:
        """Evicts as many as it takes to gain `wanted` blocks, or nobody when all of them would not do.

        Returns the blocks gained now and those gained when the launched steps have been collected.
        """
        table = self.table
        if wanted <= 0 or int(table.blocks[candidates].sum()) < wanted:
            return 0, 0
        gained_now = gained_later = 0
        for position in self.preemption.victims(Rows(table, candidates, now), now):
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

    def _preempt(self, row: int, now: float) -> None:
        rows = np.array([row], np.int32)
        self.counters.num_preemptions += 1
        self.counters.num_recomputed_tokens += int(self.table.computed[row])
        self.table.preemptions[row] += 1
        self.table.phase[row] = Phase.LEAVING
        self.running.discard(row)
        self._leaving_blocks += int(self.table.blocks[row])
        self.accounting.enter(rows, State.PREEMPTED, now)
        self._settle(rows, now)

    # -- launching and committing -------------------------------------------------------------------------------------

    def _launch(self, rows: Ints, tokens: Ints, admitted: Ints, entries: BlockEntries, now: float) -> Batch:
        table, counters = self.table, self.counters
        starts = table.computed[rows]
        computed = starts + tokens
        samples = computed == table.target[rows]
        table.computed[rows] = computed
        table.target[rows] += samples
        table.launched[rows] += 1
        table.served[rows] += tokens
        self._note_computing(rows, starts, now)
        self.policy.served(Rows(table, rows, now), tokens, now)
        self._step_id += 1
        counters.num_steps += 1
        counters.num_batched_rows += len(rows)
        counters.num_batched_tokens += int(tokens.sum())
        return Batch(
            step_id=self._step_id,
            rows=rows.copy(),
            slots=table.slot[rows],
            starts=starts,
            num_tokens=tokens,
            samples=samples,
            pad_tokens=np.zeros_like(tokens),
            admitted=tuple(self._admission(int(row)) for row in admitted),
            block_slots=entries[0],
            block_index=entries[1],
            block_ids=entries[2],
        )

    def _admission(self, row: int) -> Admission:
        table, request = self.table, self.table.request(row)
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

    def _note_computing(self, rows: Ints, starts: Ints, now: float) -> None:
        """Rows of the step prefill until their first token is there (commit says so), and decode from then on."""
        table, accounting = self.table, self.accounting
        state = np.where(starts < table.length[rows] - 1, State.PREFILL, State.DECODE).astype(np.int8)
        state[np.isnan(table.first_token[rows])] = State.PREFILL
        changed = (accounting.state[rows] != state) | accounting.queued(rows)
        if changed.any():
            accounting.enter(rows[changed], state[changed], now)

    def _note_waits(self, rows: Ints, state: State, now: float) -> None:
        """These rows got nothing in this step: on board they wait for `state`, in the queue everybody does."""
        if not len(rows):
            return
        table = self.table
        on_board = table.phase[rows] == Phase.RUNNING
        idle = rows[on_board & (table.launched[rows] == 0)]
        if len(idle):
            self.accounting.enter(idle, state, now)
        if not on_board.all():
            self.accounting.queue_waits_for(state, now)

    def commit(self, batch: Batch, output: StepOutput, now: float) -> StepEvents:
        """A step has been collected: its tokens are appended, rows end, blocks come back. Steps commit in order."""
        if self.log:
            self.log(("commit", now, batch.step_id, output))
        table, rows = self.table, batch.rows
        table.launched[rows] -= 1
        live = table.phase[rows] != Phase.ENDED
        ends = [
            self._end(int(rows[i]), FinishReason.ERROR, now, message=message)
            for i, message in output.failed.items()
            if live[i]
        ]
        takes = output.counts > 0
        kept = live[takes]
        rows_out, ids = rows[takes][kept], output.token_ids[kept]
        logprobs: list[Logprobs | None] | None = None
        if output.logprobs is not None:
            logprobs = [entry for entry, k in zip(output.logprobs, kept, strict=True) if k]
        ends += self._append(rows_out, ids, now)
        handles = table.handle[rows_out]
        self._settle(rows, now)
        return StepEvents(batch.step_id, now, handles, ids, logprobs, ends)

    def _append(self, rows: Ints, ids: Ints, now: float) -> list[Finished]:
        """One new token for each of rows; returns the ends that follow from them."""
        table, accounting = self.table, self.accounting
        self._tokens[table.slot[rows], table.length[rows]] = ids
        table.length[rows] += 1
        fresh = rows[accounting.state[rows] != State.DECODE]
        if len(fresh):
            first = fresh[np.isnan(table.first_token[fresh])]
            table.first_token[first] = now
            prefilled = fresh[accounting.state[fresh] == State.PREFILL]
            accounting.enter(prefilled, State.DECODE, now)
        stops = (table.stop_ids[rows] == ids[:, None]).any(axis=1)
        ended = stops | (table.length[rows] >= table.limit[rows])
        return [
            self._end(int(rows[i]), FinishReason.STOP, now, stop_token=int(ids[i]))
            if stops[i]
            else self._end(int(rows[i]), FinishReason.LENGTH, now)
            for i in np.flatnonzero(ended)
        ]

    def fail(self, batch: Batch, message: str, now: float) -> StepEvents:
        """A launched step came to nothing: the requests in it end with an error, all others go on."""
        if self.log:
            self.log(("fail", now, batch.step_id, message))
        table, rows = self.table, batch.rows
        table.launched[rows] -= 1
        live = rows[table.phase[rows] != Phase.ENDED]
        ends = [self._end(int(row), FinishReason.ERROR, now, message=message) for row in live]
        self._settle(rows, now)
        return StepEvents(batch.step_id, now, NO_ROWS.astype(np.int64), NO_ROWS, finished=ends)

    def _end(
        self, row: int, reason: FinishReason, now: float, *, stop_token: int | None = None, message: str = ""
    ) -> Finished:
        """Marks a row as ended; `_settle` frees it."""
        table = self.table
        if table.phase[row] == Phase.RUNNING:
            self._leaving_blocks += int(table.blocks[row])
            self.running.discard(row)
        self.waiting.discard(row)
        table.phase[row] = Phase.ENDED
        self.counters.num_finished += 1
        return Finished(
            handle=int(table.handle[row]),
            id=table.request(row).id,
            reason=reason,
            stop_token=stop_token,
            prompt_len=int(table.prompt_len[row]),
            output_len=int(table.length[row] - table.prompt_len[row]),
            cached_len=int(table.cached[row]),
            preemptions=int(table.preemptions[row]),
            arrival=float(table.arrival[row]),
            first_token=float(table.first_token[row]),
            finished=now,
            state_times=self.accounting.times(row, now),
            message=message,
        )

    def _settle(self, rows: Ints, now: float) -> None:
        """Rows that have ended or lost their place give everything back, once no launched step touches it."""
        table = self.table
        gone = rows[(table.launched[rows] == 0) & (table.phase[rows] >= Phase.LEAVING)]
        for row in map(int, gone):
            slot = int(table.slot[row])
            if table.phase[row] == Phase.LEAVING:
                self._saved[row] = self._tokens[slot, : table.length[row]].copy()
            if slot >= 0:
                self._leaving_blocks -= int(table.blocks[row])
                self.pool.release(slot)
                self._free_slots.append(slot)
            if table.phase[row] == Phase.ENDED:
                self._saved.pop(row, None)
                table.free(row)
                continue
            table.slot[row] = -1
            table.blocks[row] = table.computed[row] = 0
            table.target[row] = table.length[row]
            table.phase[row] = Phase.WAITING
            self.waiting.add(row)

    # -- what others may ask ------------------------------------------------------------------------------------------

    def waiting_by_reason(self) -> dict[str, int]:
        """How many requests of the queue wait for what."""
        preempted = sum(
            1 for row in self.waiting.rows if self.accounting.state[row] == State.PREEMPTED and row in self._saved
        )
        fresh = len(self.waiting) - preempted
        reasons = {State.PREEMPTED.label: preempted, self.accounting.queue_state.label: fresh}
        return {reason: count for reason, count in reasons.items() if count}

    def check(self) -> None:
        """Raises AssertionError where rows, slots and blocks do not add up. For tests and the watchdog."""
        table = self.table
        self.pool.check()
        slots = table.slot[table.phase >= Phase.RUNNING]
        assert len(slots) + len(self._free_slots) == self.config.seqs, "a slot is lost"
        assert self.pool.held.sum() == table.blocks[table.phase >= Phase.RUNNING].sum(), (
            "blocks held and counted differ"
        )
        assert len(self.waiting) == np.count_nonzero(table.phase == Phase.WAITING), "the queue and the table differ"
        assert len(self.running) == np.count_nonzero(table.phase == Phase.RUNNING), "the board and the table differ"
