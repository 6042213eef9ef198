"""An executor whose KV memory is checked: an independent truth about blocks, positions and tokens.

Every cell of the paged memory remembers the context, token by token, for which it was written. A row that is computed
must find all its earlier positions in the blocks that its table names, whoever wrote them; a block may not be given to
another while a launched step touches it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headway.core.batch import Batch, StepOutput, Swaps
from headway.core.config import SchedulerConfig
from headway.core.request import Request, SamplingParams
from headway.core.scheduler import Scheduler
from headway.engine.loop import EngineLoop
from headway.executors.base import Capacity
from headway.executors.simulated import VirtualClock

EOS = 7
COPY_TIME = 1e-6
"""Seconds that copying a block is said to take."""


def expected_token(handle: int, position: int, natural_len: int) -> int:
    """The token of request `handle` at `position`, its answer being `natural_len` tokens long, EOS included."""
    return EOS if position >= natural_len else 1000 + (handle * 7919 + position * 104729) % 50_000


@dataclass
class Sequence:
    handle: int
    tokens: dict[int, int]
    end: int
    shared: int
    blocks: dict[int, int] = field(default_factory=dict)


class MemoryExecutor:
    """Takes `step_time` seconds a step on a virtual clock. `natural`: handle to the number of tokens until its EOS."""

    def __init__(
        self, capacity: Capacity, clock: VirtualClock, natural: dict[int, int], step_time: float = 1.0
    ) -> None:
        self._capacity = capacity
        self.clock = clock
        self.natural = natural
        self.step_time = step_time
        self.memory: dict[tuple[int, int], int] = {}
        self.host: dict[int, list[int | None]] = {}
        self.sequences: dict[int, Sequence] = {}
        self.touched: deque[tuple[int, dict[int, int]]] = deque()
        self.free_at = 0.0
        self.batches: list[Batch] = []

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, batch: Batch) -> tuple[StepOutput, float]:
        assert len(set(batch.slots.tolist())) == len(batch.slots), "a slot is in the batch twice"
        assert (batch.num_tokens + batch.pad_tokens > 0).all()
        self.batches.append(batch)
        self._copy(batch.swaps)
        swapped_in = set(batch.swaps.in_device.tolist())
        for new in batch.admitted:
            tokens = dict(enumerate(new.token_ids.tolist()))
            shared = int(batch.starts[batch.slots == new.slot][0]) // self._capacity.block_size
            end = new.prompt_len + self.natural[new.handle] - 1
            self.sequences[new.slot] = Sequence(new.handle, tokens, end, shared)
        for slot, index, block in zip(batch.block_slots, batch.block_index, batch.block_ids, strict=True):
            sequence = self.sequences[int(slot)]
            assert int(index) == len(sequence.blocks), "a block table has a hole"
            if index >= sequence.shared or int(block) in swapped_in:
                for _, blocks in self.touched:
                    assert int(block) not in blocks, "a block was given to another too early"
            sequence.blocks[int(index)] = int(block)
        touched: dict[int, int] = {}
        out = [self._compute(batch, i, touched) for i in range(len(batch.slots))]
        self.touched.append((batch.step_id, touched))
        tokens = np.array([token for token in out if token is not None], np.int32)
        self.free_at = max(self.free_at, self.clock()) + self.step_time
        counts = batch.samples.astype(np.int32)
        copying = COPY_TIME * len(batch.swaps)
        return StepOutput(batch.step_id, counts, tokens, elapsed=self.step_time, copy_time=copying), self.free_at

    def _copy(self, swaps: Swaps) -> None:
        """Out, then in, cell by cell."""
        size = self._capacity.block_size
        assert len(set(swaps.out_host.tolist())) == len(swaps.out_host), "two blocks are copied to the same place"
        assert len(set(swaps.in_device.tolist())) == len(swaps.in_device), "two blocks are copied to the same place"
        for device, host in zip(swaps.out_device.tolist(), swaps.out_host.tolist(), strict=True):
            assert 0 <= host < self._capacity.num_host_blocks
            self.host[host] = [self.memory.get((device, i)) for i in range(size)]
        for device, host in zip(swaps.in_device.tolist(), swaps.in_host.tolist(), strict=True):
            self.memory.update(
                {(device, i): content for i, content in enumerate(self.host[host]) if content is not None}
            )

    def _compute(self, batch: Batch, i: int, touched: dict[int, int]) -> int | None:
        sequence = self.sequences[int(batch.slots[i])]
        block_size = self._capacity.block_size
        end = int(batch.starts[i] + batch.num_tokens[i])

        def cell(position: int) -> tuple[int, int]:
            return sequence.blocks[position // block_size], position % block_size

        context = 0
        for position in range(end):
            context = hash((context, sequence.tokens[position]))
            if position >= batch.starts[i]:
                self.memory[cell(position)] = context
            assert self.memory.get(cell(position)) == context, f"KV is wrong at position {position}"
            touched[cell(position)[0]] = sequence.handle
        if not batch.samples[i]:
            return None
        token = expected_token(sequence.handle, end, sequence.end)
        sequence.tokens[end] = token
        return token

    def done(self, ticket: tuple[StepOutput, float]) -> bool:
        return self.clock() >= ticket[1]

    def collect(self, ticket: tuple[StepOutput, float]) -> StepOutput:
        output, end = ticket
        step_id, _ = self.touched.popleft()
        assert step_id == output.step_id
        self.clock.advance_to(end)
        return output

    def close(self) -> None:
        pass


@dataclass
class World:
    """A scheduler, a checked executor and the loop between them, on a virtual clock."""

    config: SchedulerConfig
    num_blocks: int = 64
    block_size: int = 4
    max_model_len: int = 64
    step_time: float = 1.0
    num_host_blocks: int = 0
    spare_slots: int = 0
    classes: tuple[str, ...] = ("",)
    follow: tuple[SchedulerConfig, ...] = ()
    """Configurations that the scheduler is told to follow, another one after each step, again and again."""

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.natural: dict[int, int] = {}
        capacity = Capacity(
            self.num_blocks,
            self.block_size,
            self.config.seqs,
            self.max_model_len,
            self.num_host_blocks,
            self.spare_slots,
        )
        self.executor = MemoryExecutor(capacity, self.clock, self.natural, self.step_time)
        self.events: list = []
        self.scheduler = self.fresh_scheduler()
        self.scheduler.log = self.events.append
        self.loop = EngineLoop(self.scheduler, self.executor, self.clock)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, object] = {}

    def fresh_scheduler(self) -> Scheduler:
        return Scheduler.of(
            self.config,
            self.num_blocks,
            self.block_size,
            self.max_model_len,
            num_host_blocks=self.num_host_blocks,
            spare_slots=self.spare_slots,
        )

    def add(
        self,
        handle: int,
        prompt_len: int,
        max_tokens: int,
        natural: int = 10**6,
        arrival: float | None = None,
        cache_salt: str = "",
        priority: int | None = None,
        request_class: str | None = None,
        tenant: str | None = None,
    ):
        self.natural[handle] = natural
        request = Request(
            id=f"r{handle}",
            handle=handle,
            prompt_token_ids=[100 + handle % 3 * 200 + i for i in range(prompt_len)],  # many share a beginning
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            arrival=self.clock() if arrival is None else arrival,
            stop_token_ids=(EOS,),
            cache_salt=cache_salt,
            priority=handle % 3 if priority is None else priority,
            request_class=self.classes[handle % len(self.classes)] if request_class is None else request_class,
            tenant="abc"[handle // 2 % 3] if tenant is None else tenant,
        )
        self.loop.add(request)
        self.tokens[handle] = []
        return request

    def note(self, events) -> None:
        if events is None:
            return
        for handle, token in zip(events.handles.tolist(), events.token_ids.tolist(), strict=True):
            assert handle not in self.finished, "a token after the end"
            self.tokens[handle].append(token)
        for finished in events.finished:
            assert finished.handle not in self.finished, "ended twice"
            self.finished[finished.handle] = finished

    def abort(self, handle: int) -> None:
        self.note(self.loop.abort(handle))

    def step(self) -> bool:
        events = self.loop.step()
        self.note(events)
        if events is not None and self.follow:
            self.scheduler.follow(self.follow[events.step_id % len(self.follow)], self.clock())
        self.scheduler.check()
        return events is not None

    def drain(self, limit: int = 20_000) -> None:
        """Nobody else comes: steps until everything has ended."""
        self.scheduler.no_more(self.clock())
        steps = 0
        while steps < limit:
            if self.loop.idle:
                return
            if self.step():
                steps += 1
            else:
                assert self.loop.wait_until < float("inf"), "stuck: requests wait and nothing will ever happen"
                self.clock.advance_to(self.loop.wait_until)
        raise AssertionError("it does not end")

    def run(self, plan: list[tuple]) -> None:
        """Adds and aborts at their times, as the live engine does between steps, until everything has ended.

        `plan`: for each handle (arrival, prompt_len, max_tokens, natural length, abort after or None).
        """
        arrivals = sorted((arrival, i) for i, (arrival, *_) in enumerate(plan))
        aborts = sorted((arrival + after, i) for i, (arrival, _, _, _, after) in enumerate(plan) if after is not None)
        while arrivals or aborts or not self.loop.idle:
            now = self.clock()
            while arrivals and arrivals[0][0] <= now:
                arrival, i = arrivals.pop(0)
                self.add(i, *plan[i][1:4], arrival=arrival)
            while aborts and aborts[0][0] <= now and aborts[0][1] in self.tokens:
                self.abort(aborts.pop(0)[1])
            if not self.step():
                if not arrivals and len(self.scheduler.waiting):
                    self.scheduler.no_more(now)
                    if self.step():
                        continue
                upcoming = [events[0][0] for events in (arrivals, aborts) if events]
                if self.loop.wait_until < float("inf"):
                    upcoming.append(self.loop.wait_until)
                assert upcoming or self.loop.idle, "stuck: requests wait and nothing will ever happen"
                if upcoming:
                    self.clock.advance_to(min(upcoming))
