"""Drives an EngineLoop over traffic, on whatever clock the loop has: the one way in which strategies are measured.

Requests that fall due while a step runs are taken in at its end, as the live engine does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headway.core.batch import Finished, Ints, Longs, StepEvents
from headway.core.request import NO_SLO, FinishReason, Request, SamplingParams, Unattainable
from headway.core.table import Floats
from headway.engine.loop import EngineLoop, LoopStats
from headway.lab.traffic import Arrival

EOS = -2
"""Ends a request by itself. It is no real token: where tokens are not invented, the driver says when a request ends."""
SAMPLE_EVERY = 16
"""Steps between two looks at the fragmentation of the KV blocks."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request's history; times in seconds after the start of the run (first_token is nan where there was none,
    finished where it was refused)."""

    request: Arrival
    arrival: float
    first_token: float
    finished: float
    output_len: int
    cached_len: int
    preemptions: int
    reason: FinishReason
    state_times: dict[str, float]
    refused: float = math.nan
    """Seconds that a refused request would have waited, as predicted; it has no tokens."""

    @property
    def kept(self) -> bool:
        """Whether all that was promised was kept. A refusal is a miss."""
        slo, tpot = self.request.slo, self.tpot
        paced = not tpot > slo.tpot  # not a number where there is but one token
        return self.ttft <= slo.ttft and paced and self.e2e <= slo.deadline

    @property
    def ttft(self) -> float:
        return self.first_token - self.arrival

    @property
    def e2e(self) -> float:
        return self.finished - self.arrival

    @property
    def e2e_per_token(self) -> float:
        return self.e2e / self.output_len if self.output_len else math.nan

    @property
    def tpot(self) -> float:
        """Mean seconds per output token after the first; nan where there is but one."""
        return (self.finished - self.first_token) / (self.output_len - 1) if self.output_len > 1 else math.nan


@dataclass(frozen=True, slots=True)
class Run:
    """What a run over traffic brought: every request in the traffic's order, the loop's totals, and each gap between
    two tokens of a request (`itl` float64[k] seconds, `itl_of` int64[k], whose it is).

    `duration`: seconds until the last request ended; `drained`: until the device had nothing left to compute.
    `kv_fragmentation`: the mean of what it was every SAMPLE_EVERY steps.
    """

    served: list[Served]
    stats: LoopStats
    duration: float
    drained: float
    itl: Floats
    itl_of: Longs
    kv_fragmentation: float = 0.0

    def of_class(self, name: str) -> Run:
        """The same run, with the requests and gaps of one class only; the totals stay those of all."""
        members = np.array([one.request.request_class == name for one in self.served], np.bool_)
        keep = members[self.itl_of]
        served = [one for one in self.served if one.request.request_class == name]
        return replace(self, served=served, itl=self.itl[keep], itl_of=self.itl_of[keep])

    def values(self, name: str) -> Floats:
        """float64[n]: a latency of every request (ttft, e2e, tpot, e2e_per_token), or every gap (itl), in seconds."""
        if name == "itl":
            return self.itl
        values = np.array([getattr(one, name) for one in self.served], np.float64)
        return values[~np.isnan(values)]

    def percentile(self, name: str, percent: float) -> float:
        """In seconds; nan where there are none."""
        values = self.values(name)
        return float(np.percentile(values, percent)) if len(values) else math.nan

    @property
    def attainment(self) -> float | None:
        """The share of promises that were kept; None where nobody was promised anything."""
        promised = [one.kept for one in self.served if one.request.slo != NO_SLO]
        return sum(promised) / len(promised) if promised else None

    @property
    def goodput(self) -> float:
        """Promises kept per second of the arrivals."""
        arrivals = max((one.arrival for one in self.served), default=0.0)
        return sum(one.kept for one in self.served if one.request.slo != NO_SLO) / arrivals if arrivals else 0.0

    @property
    def output_tokens(self) -> int:
        return sum(one.output_len for one in self.served)

    @property
    def output_throughput(self) -> float:
        """Output tokens per second, from the start to the last end."""
        return self.output_tokens / self.duration if self.duration else 0.0

    def request_rate(self, users: int) -> float:
        """Requests finished per second. Where there are at least ten for each of `users`, from the tenth to the
        ninetieth per cent of the ends, so that neither filling nor draining counts."""
        ends = sorted(one.finished for one in self.served if math.isnan(one.refused))
        if len(ends) < 10 * users:
            return len(ends) / ends[-1]
        first, last = len(ends) // 10, len(ends) * 9 // 10
        return (last - first) / (ends[last] - ends[first])

    @property
    def padding_waste(self) -> float:
        """The share of computed tokens that nobody wanted: padding, and what was computed again."""
        useful = self.stats.num_batched_tokens - self.stats.num_recomputed_tokens
        computed = self.stats.num_batched_tokens + self.stats.num_pad_tokens
        return 1.0 - useful / computed if computed else 0.0

    @property
    def host_gap(self) -> float:
        """The share of the run in which there was work but no step was computed."""
        return self.stats.host_gap / self.drained if self.drained else 0.0

    @property
    def busy(self) -> float:
        """The share of the run in which the device computed."""
        return self.stats.device_time / self.drained if self.drained else 0.0

    @property
    def utilisation(self) -> float:
        """The share of the run in which the device computed something wanted."""
        return self.busy * (1.0 - self.padding_waste)


def nobody(ended: int) -> None:
    """Watches nothing."""


@dataclass(slots=True)
class Driver:
    """Runs `loop` over `traffic`; `rest(until)` lets the loop's clock pass to `until` or beyond.

    `users` None: requests come when they are due. Otherwise a closed loop: so many at first, and the next whenever one
    has ended. `watch` is called after each step with how many have ended.
    """

    loop: EngineLoop
    traffic: Sequence[Arrival]
    rest: Callable[[float], None]
    users: int | None = None
    watch: Callable[[int], None] = nobody
    _start: float = 0.0
    _arrived: list[float] = field(default_factory=list)
    _finished: dict[int, Finished] = field(default_factory=dict)
    _refused: dict[int, Served] = field(default_factory=dict)
    _last: Floats = field(default_factory=lambda: np.zeros(0))
    _left: Longs = field(default_factory=lambda: np.zeros(0, np.int64))
    _gaps: list[tuple[Floats, Longs]] = field(default_factory=list)
    _fragmentation: list[float] = field(default_factory=list)

    def run(self) -> Run:
        """Serves all of the traffic to its end.

        Raises:
            RequestError: a request that could never be served.
            RuntimeError: requests wait and nothing will ever happen.
        """
        loop, clock = self.loop, self.loop.clock
        self._start = clock()
        self._last = np.full(len(self.traffic), np.nan)
        self._left = np.array([plan.output_len for plan in self.traffic], np.int64)
        pending = deque(sorted(range(len(self.traffic)), key=lambda index: self.traffic[index].at))
        said = False
        while pending or not loop.idle:
            while pending and self._due(pending[0]) <= clock():
                self._add(pending.popleft())
            if not pending and not said:
                loop.no_more()
                said = True
            events = loop.step()
            if events is not None:
                self._note(events)
                continue
            until = min(loop.wait_until, self._due(pending[0]) if pending else math.inf)
            if until < math.inf:
                self.rest(until)
            elif not loop.idle:
                raise RuntimeError("requests wait and nothing will ever happen: this is a defect in headway")
        return self._result()

    def _due(self, index: int) -> float:
        """When the request comes, on the loop's clock."""
        if self.users is None:
            return self._start + self.traffic[index].at
        gone = len(self._finished) + len(self._refused)
        return -math.inf if len(self._arrived) - gone < self.users else math.inf

    def _add(self, index: int) -> None:
        plan = self.traffic[index]
        prompt = _stand_in(index, plan.prompt) if isinstance(plan.prompt, int) else plan.prompt
        arrival = self._due(index) if self.users is None else self.loop.clock()
        self._arrived.append(arrival)
        exactly = plan.max_tokens is None
        request = Request(
            id=f"r{index}",
            handle=index,
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=plan.output_len if exactly else plan.max_tokens, temperature=0.0, ignore_eos=exactly
            ),
            arrival=arrival,
            stop_token_ids=() if exactly else (EOS,),
            priority=plan.priority,
            slo=plan.slo,
            tenant=plan.tenant,
            request_class=plan.request_class,
        )
        try:
            self.loop.add(request)
        except Unattainable as refusal:
            self._refused[index] = Served(
                plan, arrival - self._start, math.nan, math.nan, 0, 0, 0, FinishReason.ABORT, {}, refusal.retry_after
            )

    def _note(self, events: StepEvents) -> None:
        if events.step_id % SAMPLE_EVERY == 0 and len(self.loop.scheduler.running):
            self._fragmentation.append(self.loop.scheduler.kv_fragmentation)
        handles = events.handles
        if len(handles):
            gaps = events.now - self._last[handles]
            known = ~np.isnan(gaps)
            self._gaps.append((gaps[known], handles[known]))
            self._last[handles] = events.now
            self._left[handles] -= 1
        self._note_ends(events)
        for handle in handles[self._left[handles] == 0].tolist():
            if handle not in self._finished:
                ended = self.loop.abort(handle, FinishReason.STOP)
                assert ended is not None, "a request that got a token is live"
                self._note_ends(ended)
        self.watch(len(self._finished))

    def _note_ends(self, events: StepEvents) -> None:
        for finished in events.finished:
            self._finished[finished.handle] = finished

    def _result(self) -> Run:
        served = [self._served(index) for index in range(len(self.traffic))]
        gaps = [np.concatenate(part) for part in zip(*self._gaps, strict=True)] or [np.zeros(0), np.zeros(0, np.int64)]
        duration = max((one.finished for one in served if one.output_len), default=0.0)
        drained = self.loop.clock() - self._start
        fragmentation = float(np.mean(self._fragmentation)) if self._fragmentation else 0.0
        return Run(served, self.loop.stats(), duration, drained, gaps[0], gaps[1], fragmentation)

    def _served(self, index: int) -> Served:
        if index in self._refused:
            return self._refused[index]
        end = self._finished[index]
        return Served(
            request=self.traffic[index],
            arrival=end.arrival - self._start,
            first_token=end.first_token - self._start,
            finished=end.finished - self._start,
            output_len=end.output_len,
            cached_len=end.cached_len,
            preemptions=end.preemptions,
            reason=end.reason,
            state_times=end.state_times,
        )


def _stand_in(index: int, length: int) -> Ints:
    """int32[length], a prompt that shares no beginning with another's."""
    ids = np.arange(length, dtype=np.int32)
    ids[0] = index
    return ids
