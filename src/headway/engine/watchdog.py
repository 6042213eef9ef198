"""Watchdog: notices that requests wait and nothing happens, says how things stand, and gets them going again.

While a step is launched it is the device that is waited for, however long that takes: no recovery could help there, and
a slow device is no fault. A wait whose end is known, such as a window, is waited for once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from headway.core.batch import StepEvents
from headway.core.config import SchedulerConfig
from headway.core.request import FinishReason
from headway.core.table import Phase

if TYPE_CHECKING:
    from headway.engine.loop import EngineLoop

SHOWN = 50
"""Rows of which a dump tells."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """`line` says what was wrong and what was done, `dump` how everything stood before; `ended` are requests that could
    not go on."""

    line: str
    dump: str
    ended: StepEvents | None = None


class Broken(RuntimeError):
    """The scheduler's books do not add up: going on could give one request's memory to another."""


class Watchdog:
    """Looks at a loop that has found nothing to do. `patience` in seconds.

    It first takes the plainest strategies; if still nobody can go on, those on board but the oldest lose their places
    and come back one after the other; if not even the oldest can go on, it is failed. Each is tried at the next look
    after the one before has not helped.
    """

    def __init__(self, loop: EngineLoop, patience: float) -> None:
        self.loop = loop
        self.patience = patience
        self.due = math.inf
        """When to look again if nothing happens before."""
        self._seen = -1
        self._remedies: Iterator[tuple[str, StepEvents | None]] = iter(())

    def look(self) -> Alarm | None:
        """Call when the loop had nothing to launch and nothing to collect.

        Raises:
            Broken: requests are stuck, and the scheduler's books do not add up.
        """
        loop, scheduler = self.loop, self.loop.scheduler
        if loop.num_in_flight or not (len(scheduler.waiting) or len(scheduler.running)):
            self._seen, self.due = -1, math.inf
            return None
        now = loop.clock()
        if scheduler.counters.num_steps != self._seen:
            promised = loop.wait_until if loop.wait_until < math.inf else now
            self._seen, self.due = scheduler.counters.num_steps, max(now, promised) + self.patience
            self._remedies = self._all_remedies()
        if now < self.due:
            return None
        why, dump = reason(loop, self.patience), describe(loop)
        try:
            scheduler.check()
        except AssertionError as error:
            raise Broken(f"{why}; the scheduler's books do not add up ({error})\n{dump}") from None
        what, ended = next(self._remedies)
        return Alarm(f"{why}; {what}", dump, ended)

    def _all_remedies(self) -> Iterator[tuple[str, StepEvents | None]]:
        """What is done, one thing after the other, and the ends that come of it."""
        loop, scheduler = self.loop, self.loop.scheduler
        config = plain(scheduler.config)
        loop.follow(config)
        yield f"from now on batching is {config.batching} and the policy {config.policy}", None
        if len(scheduler.running) > 1:
            count = scheduler.unseat(loop.clock())
            yield f"{count} of those on board have lost their places and come back one after the other", None
        while True:
            request = scheduler.table.request(_oldest(loop))
            message = f"the request could not go on: {reason(loop, self.patience)}"
            ended = scheduler.abort(request.handle, loop.clock(), FinishReason.ERROR, message=message)
            yield f"request {request.id} is failed, since it cannot go on", ended


def plain(config: SchedulerConfig) -> SchedulerConfig:
    """Admit at every step, in order of arrival; all limits of memory and of a step stay. Formation and policy are made
    anew even where they are the plain ones already."""
    return replace(
        config,
        batching="inflight" if config.batching == "continuous" else "continuous",
        policy="aged:fcfs" if config.policy == "fcfs" else "fcfs",
        budget="decode-first",
        length_clusters=False,
        burst_size=None,
    )


def _oldest(loop: EngineLoop) -> int:
    """Of those on board, or of the queue."""
    scheduler = loop.scheduler
    rows = scheduler.running.rows if len(scheduler.running) else scheduler.waiting.rows
    return int(rows[np.argmin(scheduler.table.seq[rows])])


def reason(loop: EngineLoop, patience: float) -> str:
    """What is wrong, in one line."""
    scheduler = loop.scheduler
    waiting = ", ".join(f"{count} {name}" for name, count in scheduler.waiting_by_reason().items())
    detail = scheduler.accounting.queue_detail
    on_board = ", ".join(f"{count} {name}" for name, count in scheduler.paused_by_reason().items())
    parts = [f"nothing was admitted or computed for {patience:g} s"]
    if waiting:
        parts.append(f"in the queue: {waiting}{f' ({detail})' if detail else ''}")
    if on_board:
        parts.append(f"on board: {on_board}")
    return "; ".join(parts)


def describe(loop: EngineLoop) -> str:
    """How everything stands, for a person."""
    scheduler, now = loop.scheduler, loop.clock()
    pool, strategies, config = scheduler.pool, scheduler.strategies, scheduler.config
    chosen = (strategies.formation, strategies.policy, strategies.budget, strategies.preemption)
    lines = [
        f"headway watchdog at {now:.3f} s",
        f"  strategies: {', '.join(type(one).__name__ for one in chosen)}",
        f"  {config}",
        f"  KV blocks: {pool.available} of {pool.num_blocks} available, {scheduler.board.leaving_blocks} coming back; "
        f"{pool.block_size} tokens each",
        f"  slots: {scheduler.board.num_free} of {scheduler.board.num_slots} free, "
        f"{len(scheduler.board.lingering)} kept by requests that have ended",
        f"  launched steps: {loop.num_in_flight}; asks again at {loop.wait_until:.3f} s",
        "  last steps (number, seconds ago, rows, tokens): "
        + (
            ", ".join(f"({n}, {now - at:.1f}, {rows:g}, {tokens:g})" for n, at, rows, tokens in loop.last_steps)
            or "none"
        ),
        "  requests (id, phase, state, seconds here, prompt, known, computed, target, limit, blocks, launched):",
    ]
    table = scheduler.table
    rows = np.concatenate([scheduler.running.rows, scheduler.waiting.rows])
    for row in rows[:SHOWN].tolist():
        request = table.requests[row]
        if request is None:
            lines.append(f"    row {row} is free")
            continue
        timeline = scheduler.timeline(request.handle, now)
        facts = (
            table.prompt_len,
            table.length,
            table.computed,
            table.target,
            table.limit,
            table.blocks,
            table.launched,
        )
        state = f"{timeline[-1].state} {timeline[-1].detail}".strip() if timeline else "-"
        lines.append(
            f"    {request.id}, {Phase(int(table.phase[row])).name.lower()}, {state}, {now - request.arrival:.1f}, "
            + ", ".join(str(int(column[row])) for column in facts)
        )
    if len(rows) > SHOWN:
        lines.append(f"    ... and {len(rows) - SHOWN} more")
    return "\n".join(lines)
