"""Timelines: what a request did when, from marks that are made only where it begins to do something else.

A row has its own marks. Rows that wait together share those of their lane, and take a copy along when they leave it.
Both are bounded: what is too long is folded in its middle, where only the seconds by state are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

SEVERAL = -1
"""Stands for the states of a stretch that has been folded."""
FIRST, MOST = 12, 40
"""Of a row's marks: so many at the beginning are never folded; how many there may be."""
RECENT = 24
"""Turns that a lane remembers singly."""


class Span(NamedTuple):
    """A stretch of a request's time in one state.

    start, end: seconds on the engine's clock; spans follow each other without a gap. first_step, last_step: the steps
    that were put together or collected meanwhile (last < first: none). tokens: computed for it meanwhile. detail: which
    limit, where a state has several. times: seconds by state where `state` is "several".
    """

    state: str
    start: float
    end: float
    first_step: int
    last_step: int
    tokens: int
    detail: str = ""
    times: dict[str, float] | None = None


class Mark(NamedTuple):
    """From `at` on (seconds) in `state`; `step` is the first step of it, `served` the tokens computed by then."""

    at: float
    state: int
    step: int
    served: int
    detail: str = ""
    times: dict[int, float] | None = None
    """Seconds by state up to the next mark, where the state is SEVERAL."""


def note(marks: list[Mark], mark: Mark) -> None:
    """Adds a mark; a state that took no time is forgotten, equal ones are one, and the list stays bounded."""
    if marks and marks[-1].at == mark.at and marks[-1].served == mark.served:
        mark = mark._replace(step=min(mark.step, marks.pop().step))
    if marks and (marks[-1].state, marks[-1].detail) == (mark.state, mark.detail) and mark.times is None:
        return
    marks.append(mark)
    if len(marks) > MOST:
        marks[FIRST : FIRST + 2] = [_fold(*marks[FIRST : FIRST + 3])]


def _fold(one: Mark, two: Mark, end: Mark) -> Mark:
    times = _seconds(one, two.at)
    for state, seconds in _seconds(two, end.at).items():
        times[state] = times.get(state, 0.0) + seconds
    return Mark(one.at, SEVERAL, one.step, one.served, "", times)


def _seconds(mark: Mark, until: float) -> dict[int, float]:
    return dict(mark.times) if mark.times is not None else {mark.state: until - mark.at}


def spans(marks: Sequence[Mark], end: Mark, labels: Sequence[str]) -> list[Span]:
    """The timeline up to `end`, of which state and detail do not matter."""
    result = []
    for mark, after in zip(marks, [*marks[1:], end], strict=True):
        if after.at == mark.at and after.served == mark.served:
            continue
        state = labels[mark.state] if mark.times is None else "several"
        times = None if mark.times is None else {labels[i]: seconds for i, seconds in mark.times.items()}
        tokens = after.served - mark.served
        result.append(Span(state, mark.at, after.at, mark.step, after.step - 1, tokens, mark.detail, times))
    return result


def sums(timeline: Sequence[Span]) -> dict[str, float]:
    """Seconds by state."""
    total: dict[str, float] = {}
    for span in timeline:
        for state, seconds in (span.times or {span.state: span.end - span.start}).items():
            total[state] = total.get(state, 0.0) + seconds
    return total


class Turn(NamedTuple):
    """What a lane waits for from `at` on. `clock`: seconds by state until then, since the lane began."""

    number: int
    at: float
    state: int
    step: int
    detail: str
    clock: dict[int, float]


class Joined(NamedTuple):
    """When a row came into a lane, and the lane's turn at that time."""

    at: float
    step: int
    turn: Turn


class Lane:
    """Rows that wait together, for the same thing at any moment: one clock for all of them, however many they are."""

    def __init__(self, state: int) -> None:
        self.size = 0
        self.turn = Turn(0, 0.0, state, 0, "", {})
        self._recent = deque([self.turn], maxlen=RECENT)

    def waits_for(self, state: int, detail: str, now: float, step: int) -> None:
        """From now on all of them wait for this."""
        old = self.turn
        if state == old.state and detail == old.detail:
            return
        clock = {**old.clock, old.state: old.clock.get(old.state, 0.0) + now - old.at}
        self.turn = Turn(old.number + 1, now, state, step, detail, clock)
        self._recent.append(self.turn)

    def marks(self, joined: Joined, served: int) -> list[Mark]:
        """Of a row that joined then and has had nothing computed since."""
        at, step, first = joined
        later = [turn for turn in self._recent if turn.number > first.number]
        begin = Mark(at, first.state, step, served, first.detail)
        if later and later[0].number > first.number + 1:
            times = {state: t - first.clock.get(state, 0.0) for state, t in later[0].clock.items()}
            times[first.state] -= at - first.at
            begin = Mark(at, SEVERAL, step, served, "", {k: t for k, t in times.items() if t > 1e-12})
        return [begin, *(Mark(turn.at, turn.state, turn.step, served, turn.detail) for turn in later)]
