"""Timelines: where the time of an answer went, from when its request reached this process to the answer's last byte.

The engine accounts for its part, and this process for what comes before and after. Both read the machine's monotonic
clock, so that the parts join without a gap.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from headway.core.batch import Finished
from headway.core.timeline import Span, sums
from headway.engine.api import Choice, Engine, Stream

READING = "reading"
"""In this process: reading and checking the request, applying the template, tokenising."""
DELIVERY = "delivery"
"""In this process: from the engine's last token to the last byte; the way here, text, and choices that take longer."""
KEPT = 1000
"""Answers that are remembered after their end."""


class Visit:
    """One answer: when it began and ended, and of each choice the engine's account or, while it is live, its handle."""

    __slots__ = ("begun", "created", "ended", "ends", "id", "live", "tenant")

    def __init__(self, id: str, begun: float, tenant: str) -> None:
        self.id = id
        self.tenant = tenant
        self.begun = begun
        self.created = time.time() - (time.monotonic() - begun)
        self.ended: float | None = None
        self.live: dict[int, int] = {}
        self.ends: dict[int, Finished] = {}


class Timelines:
    """The visits under way and the latest that have ended, by their tenants and the ids that clients saw. Where there
    are no keys, all are of one tenant, ""."""

    def __init__(self) -> None:
        self._visits: dict[tuple[str, str], Visit] = {}
        self._ended: deque[Visit] = deque()
        self._choices: dict[int, tuple[Visit, int]] = {}

    def open(self, id: str, begun: float, streams: Sequence[Stream], tenant: str = "") -> Visit:
        """An answer of `streams`, one a prompt, to a request that came at `begun` (monotonic seconds)."""
        visit = Visit(id, begun, tenant)
        self._visits.pop((tenant, id), None)  # the latest stands last
        self._visits[tenant, id] = visit
        choices = [choice for stream in streams for choice in stream.choices]
        for index, choice in enumerate(choices):
            visit.live[index] = choice.handle
            self._choices[choice.handle] = visit, index
        return visit

    def note(self, end: Finished, choice: Choice) -> None:
        """An on_finished hook."""
        visit, index = self._choices.pop(end.handle, (None, 0))
        if visit is not None:
            visit.ends[index] = end
            del visit.live[index]

    def close(self, visit: Visit, now: float) -> None:
        """Its last byte has been written, or nobody reads it any more."""
        visit.ended = now
        self._ended.append(visit)
        if len(self._ended) > KEPT:
            self._forget(self._ended.popleft())

    def _forget(self, visit: Visit) -> None:
        if self._visits.get((visit.tenant, visit.id)) is visit:
            del self._visits[visit.tenant, visit.id]
        for handle in visit.live.values():  # the engine has never accounted for it
            self._choices.pop(handle, None)

    def _find(self, id: str, tenant: str | None) -> Visit | None:
        if tenant is not None:
            return self._visits.get((tenant, id))
        return next((visit for visit in reversed(self._visits.values()) if visit.id == id), None)

    async def show(self, id: str, engine: Engine, tenant: str | None) -> dict[str, Any] | None:
        """What a client of this tenant reads (None: of any; ids of several tenants may be the same, then the latest);
        None where the id is not known (any more).

        Raises:
            EngineDead: a part of it is the engine's to tell.
        """
        visit = self._find(id, tenant)
        if visit is None:
            return None
        traces = {index: await engine.timeline(handle) for index, handle in list(visit.live.items())}
        now = time.monotonic()
        choices = [
            _finished(visit, index, visit.ends[index], now)
            if index in visit.ends
            else _live(visit, index, traces.get(index) or [], now)
            for index in sorted([*visit.ends, *visit.live])
        ]
        return {
            "id": id,
            "object": "request.timeline",
            "status": "running" if visit.ended is None else "finished",
            "start": visit.created,
            "seconds": (visit.ended if visit.ended is not None else now) - visit.begun,
            "choices": choices,
        }


def _finished(visit: Visit, index: int, end: Finished, now: float) -> dict[str, Any]:
    until = visit.ended if visit.ended is not None else now
    spans = [*end.timeline, Span(DELIVERY, end.finished, until, 0, -1, 0)]
    return {
        "index": index,
        "finish_reason": end.reason.label,
        "prompt_tokens": end.prompt_len,
        "completion_tokens": end.output_len,
        "cached_tokens": end.cached_len,
        "preemptions": end.preemptions,
    } | _story(visit.begun, end.arrival, spans, until)


def _live(visit: Visit, index: int, spans: list[Span], now: float) -> dict[str, Any]:
    until = visit.ended if visit.ended is not None else spans[-1].end if spans else now
    return {"index": index, "finish_reason": None} | _story(
        visit.begun, spans[0].start if spans else until, spans, until
    )


def _story(begun: float, arrival: float, engine: list[Span], until: float) -> dict[str, Any]:
    """All of it, in seconds after `begun`. The engine may hear later than the client that an answer has ended (a stop
    string, a client that left): what it does after that is not the client's time."""
    spans = [Span(READING, begun, arrival, 0, -1, 0), *engine]
    spans = [_cut(span, until) for span in spans if span.start < until]
    return {
        "seconds": until - begun,
        "states": sums(spans),
        "timeline": [_shown(span, begun) for span in spans if span.end > span.start],
    }


def _cut(span: Span, until: float) -> Span:
    """The part of it that lies before `until`."""
    if span.end <= until:
        return span
    share = (until - span.start) / (span.end - span.start)
    times = span.times and {state: seconds * share for state, seconds in span.times.items()}
    return span._replace(end=until, times=times)


def _shown(span: Span, begun: float) -> dict[str, Any]:
    shown: dict[str, Any] = {"state": span.state, "start": span.start - begun, "end": span.end - begun}
    if span.last_step >= span.first_step:
        shown["steps"] = [span.first_step, span.last_step]
    if span.tokens:
        shown["tokens"] = span.tokens
    if span.detail:
        shown["detail"] = span.detail
    if span.times is not None:
        shown["states"] = span.times
    return shown
