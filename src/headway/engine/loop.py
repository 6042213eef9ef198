"""The one loop: schedule, launch, collect, commit, with up to `depth` steps launched at a time.

The live engine, the in-process LLM, the paced benchmarks and the twin all run it; only clock and executor differ.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headway.core.batch import Batch, StepEvents, Wait
from headway.core.config import SchedulerConfig
from headway.core.request import FinishReason, Request
from headway.core.scheduler import Scheduler
from headway.core.timeline import Span
from headway.engine.config import EngineConfig
from headway.engine.event_log import EventLog
from headway.executors import make_executor
from headway.executors.base import Capacity, Executor
from headway.executors.config import ExecutorConfig

HOST_TIME = 0.0005
"""Seconds that launching a step is taken to need, waking up included, until that has been measured."""
LOOK_EVERY = 0.04
"""While a step is held back: the share of the hold after which to see whether the device is idle already."""
LOOK_WITHIN = 0.001, 0.01
"""Bounds of that in seconds: a prediction may be wrong by orders of magnitude while few steps are known."""
SPARE_SLOTS = 8
"""Requests that may take the places of others while those are still in a launched step."""

LAST_STEPS = 16


@dataclass(frozen=True, slots=True)
class LoopStats:
    """A snapshot. Totals count since the start; times in seconds; usage, fragmentation, efficiency and error are shares
    (`step_time_error`: of predictions of steps, nan before there were any)."""

    num_running: int
    num_waiting: int
    waiting_by_reason: dict[str, int]
    paused_by_reason: dict[str, int]
    """Of those on board."""
    queue_limit: str
    """Which limit the head of the queue waits for, where its reason has several."""
    kv_usage: float
    host_kv_usage: float
    kv_fragmentation: float
    num_preemptions: int
    num_swaps: int
    num_swapped_blocks: int
    num_recomputed_tokens: int
    num_prefix_queries: int
    num_prefix_hits: int
    num_forgotten_blocks: int
    num_steps: int
    num_batched_tokens: int
    num_batched_rows: int
    num_pad_tokens: int
    batch_efficiency: float
    device_time: float
    step_time_error: float
    host_gap: float
    """Time in which there was work but the device had none."""
    fairness: float
    """Jain's index of the last 30 s (see TenantService.index)."""
    tenant_tokens: dict[str, int]
    """Computed for each tenant that the configuration names."""
    tenant_counters: dict[str, float]
    """The policy's own account of that, over the weight; empty where it keeps none."""


class EngineLoop:
    """Drives a scheduler and an executor on a clock. Not thread safe: one thread owns it."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Callable[[], float], event_log: EventLog | None = None
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.event_log = event_log
        self.scheduler.log = event_log or scheduler.log
        self.wait_until = math.inf
        self.last_steps: deque[tuple[int, float, float, float]] = deque(maxlen=LAST_STEPS)
        """Of the steps launched last: number, time, rows, tokens."""
        self._in_flight: deque[tuple[Batch, Any, float]] = deque()
        self._prepared: Batch | None = None
        self._launch_at = -math.inf
        self._ended = 0.0
        self._host_time = HOST_TIME
        self._device_time = 0.0
        self._host_gap = 0.0
        self._idle_since: float | None = None

    def add(self, request: Request) -> None:
        """Raises RequestError when the request can never be served."""
        self.scheduler.add(request, self.clock())

    def follow(self, config: SchedulerConfig) -> None:
        """Other strategies and limits from the next step on. Raises ValueError as Scheduler.follow does."""
        self.scheduler.follow(config, self.clock())

    def no_more(self) -> None:
        """Nobody else will come for now: a group that is not full need not wait for more."""
        self.scheduler.no_more(self.clock())

    def abort(
        self, handle: int, reason: FinishReason = FinishReason.ABORT, stop_token: int | None = None
    ) -> StepEvents | None:
        """Ends a request; None when it has ended already."""
        return self.scheduler.abort(handle, self.clock(), reason, stop_token)

    def timeline(self, handle: int) -> list[Span] | None:
        """Where the time of a live request has gone so far; None when there is no such request."""
        return self.scheduler.timeline(handle, self.clock())

    def step(self) -> StepEvents | None:
        """Launches what may be launched, collects the oldest step and commits it.

        Returns None when there is nothing to collect yet; `wait_until` then says when to ask again even if nothing
        arrives. A prepared step is held back as long as its formation lets late arrivals board.
        """
        self.wait_until = math.inf
        while len(self._in_flight) < self.scheduler.config.depth and self._prepare():
            if self._holds():
                return None
            self._launch()
        if not self._in_flight:
            self._idle_since = None
            return None
        batch, ticket, began = self._in_flight.popleft()
        try:
            output = self.executor.collect(ticket)
        except Exception as error:  # whatever a device may throw ends the requests of this step only
            return self.scheduler.fail(batch, f"the step failed: {type(error).__name__}: {error}", self.clock())
        now = self.clock()
        self._device_time += output.device_time
        self._idle_since = None if self._in_flight else now
        self._ended = min(now, max(began, self._ended) + output.elapsed)
        return self.scheduler.commit(batch, output, now)

    def _prepare(self) -> bool:
        """Has a batch ready to be launched, if there is anything to compute."""
        if self._prepared is None:
            now = self.clock()
            batch = self.scheduler.schedule(now)
            if isinstance(batch, Wait):
                self.wait_until = batch.until
                return False
            self._prepared = batch
            self._launch_at = -math.inf
            if self._in_flight:
                self._launch_at = self.scheduler.strategies.formation.launch_at(self._expected_end(), self._host_time)
        return True

    def _holds(self) -> bool:
        """Whether the doors of the prepared batch stay open. Never past the end of what the device computes."""
        now = self.clock()
        if self._launch_at <= now or all(self.executor.done(ticket) for _, ticket, _ in self._in_flight):
            return False
        least, most = LOOK_WITHIN
        look = min(most, max(least, LOOK_EVERY * (self._launch_at - self._running_since)))
        self.wait_until = min(self._launch_at, now + look)
        return True

    def _launch(self) -> None:
        assert self._prepared is not None
        now = self.clock()
        batch = self._prepared
        held = self._launch_at > -math.inf
        if held:
            batch = self.scheduler.add_late(batch, now)
        self._prepared = None
        if self._idle_since is not None:
            self._host_gap += now - self._idle_since
            self._idle_since = None
        self.last_steps.append((batch.step_id, now, batch.load.rows, batch.load.tokens))
        self._in_flight.append((batch, self.executor.launch(batch), now))
        took = self.clock() - (self._launch_at if held else now)
        self._host_time = max(took, 0.99 * self._host_time)

    def _expected_end(self) -> float:
        """When the device will have worked off what is launched, at the earliest."""
        at_least = self.scheduler.step_time.at_least
        return self._running_since + sum(at_least(batch.load) for batch, _, _ in self._in_flight)

    @property
    def _running_since(self) -> float:
        """When the device began with the oldest step in flight: what came before has ended, and it was launched."""
        return max(self._ended, self._in_flight[0][2])

    @property
    def holding(self) -> bool:
        """A prepared batch is held back while the device computes."""
        return self._prepared is not None

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched."""
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is launched."""
        return not (self._prepared or self._in_flight or len(self.scheduler.table))

    def stats(self) -> LoopStats:
        scheduler, counters = self.scheduler, self.scheduler.counters
        return LoopStats(
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            waiting_by_reason=scheduler.waiting_by_reason(),
            paused_by_reason=scheduler.paused_by_reason(),
            queue_limit=scheduler.accounting.queue_detail,
            kv_usage=scheduler.pool.usage,
            host_kv_usage=scheduler.host.usage,
            kv_fragmentation=scheduler.kv_fragmentation,
            num_preemptions=counters.num_preemptions,
            num_swaps=counters.num_swaps,
            num_swapped_blocks=counters.num_swapped_blocks,
            num_recomputed_tokens=counters.num_recomputed_tokens,
            num_prefix_queries=counters.num_prefix_queries,
            num_prefix_hits=counters.num_prefix_hits,
            num_forgotten_blocks=scheduler.pool.num_forgotten,
            num_steps=counters.num_steps,
            num_batched_tokens=counters.num_batched_tokens,
            num_batched_rows=counters.num_batched_rows,
            num_pad_tokens=counters.num_pad_tokens,
            batch_efficiency=counters.num_batched_rows / max(1, counters.num_steps * scheduler.config.max_batch_size),
            device_time=self._device_time,
            step_time_error=scheduler.step_time.error,
            host_gap=self._host_gap,
            fairness=scheduler.service.index(scheduler.config.tenant_weights, self.clock()),
            tenant_tokens=scheduler.service.of(scheduler.config.tenants),
            tenant_counters=scheduler.tenant_counters(),
        )

    def close(self) -> None:
        self.executor.close()
        if self.event_log is not None:
            self.event_log.close()


def make_scheduler(config: EngineConfig, capacity: Capacity) -> Scheduler:
    """The scheduler that fits what an executor can hold."""
    limits = replace(config.scheduler, max_num_seqs=capacity.max_num_seqs)
    return Scheduler.of(
        limits,
        capacity.num_blocks,
        capacity.block_size,
        capacity.max_model_len,
        secret=os.urandom(32),
        num_host_blocks=capacity.num_host_blocks,
        spare_slots=capacity.spare_slots,
    )


def build_loop(config: EngineConfig, model_path: str, report: Callable[[str], None]) -> EngineLoop:
    """The loop of a live engine: its executor loads the model and tells `report` what memory it takes.

    Raises:
        ModelError: the model cannot be read or does not fit.
    """
    executor = make_executor(
        config.executor,
        ExecutorConfig(
            model=model_path,
            dtype=config.dtype,
            device=config.device,
            kv_cache_memory=config.kv_cache_memory,
            swap_space=config.swap_space,
            gpu_memory_utilization=config.gpu_memory_utilization,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.scheduler.seqs,
            spare_slots=SPARE_SLOTS,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            threads=config.threads,
            kernels=config.kernels,
            quantization=config.quantization,
        ),
        report,
    )
    log = EventLog(config.event_log) if config.event_log is not None else None
    return EngineLoop(make_scheduler(config, executor.capacity()), executor, time.monotonic, log)
