"""Where each request's time goes: named states that sum to its end-to-end time by construction.

A row on board has a state of its own. Rows of the queue wait in lanes, one running clock for all of a lane, so that a
hundred thousand of them cost nothing. Who was asked and could not come for a reason of its own stands apart from its
lane until that changes. A row that waits to come back after it lost its place has a state of its own as well (`enter`
it), and so has one that is kept out of the queue (`hold` and `release` it).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from headway.core.arrival_order import ArrivalOrder
from headway.core.batch import Ints, Longs
from headway.core.table import ENDED, RequestTable
from headway.core.timeline import Joined, Lane, Mark, Span, note, spans


class State(IntEnum):
    """What a request spends its time on. The names in lower case are what people read."""

    INTAKE = 0
    """On its way to the scheduler, which was busy with a step."""
    WAIT_STEP = 1
    """In the queue, until the next step is put together."""
    WAIT_ROW = 2
    """The batch or the admitted set is full, or so many have been admitted as may in one step."""
    WAIT_BLOCKS = 3
    """Not enough free KV blocks, in the queue or on board."""
    WAIT_BUDGET = 4
    """The step's token budget is used up, in the queue or on board."""
    WAIT_WINDOW = 5
    """The formation holds the doors shut."""
    PREEMPTED = 6
    """Lost its place to another; waiting to come back."""
    PREFILL = 7
    DECODE = 8
    WAIT_CADENCE = 9
    """In the queue, and it is not its class's turn."""
    WAIT_POLICY = 10
    """Held back by the policy. In the queue: in order of arrival it would have its place by now, but the policy gave
    that to one that came later. On board: it pauses for one of a better rank."""
    SWAPPED = 11
    """Lost its place, but its KV lies in the host's memory; waiting to come back."""
    WAIT_QUOTA = 12
    """Outside the queue: as many of its tenant are in flight as may be."""

    @property
    def label(self) -> str:
        return self.name.lower()


WAIT_STEP, WAIT_ROW, PREFILL, DECODE = State.WAIT_STEP, State.WAIT_ROW, int(State.PREFILL), int(State.DECODE)
"""Members by names of their own: in the hot paths an attribute of an enum costs more than what it is for."""
LABELS = tuple(state.label for state in State)

LANED = 64
"""What `Accounting.state` holds of the rows in a lane: this and the lane's number."""
QUEUE, OVERTAKEN, TURN = range(3)
"""Lanes: the queue; those of it whom the policy has held back; those who are admitted on their class's turn only."""


class Accounting:
    """The marks and states of a table's rows. `state` int8[capacity]: what a row does now."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self.state = np.zeros(table.capacity, np.int8)
        self._marks: dict[int, list[Mark]] = {}
        self._lanes = Lane(WAIT_STEP), Lane(State.WAIT_POLICY), Lane(WAIT_STEP)
        self._joined: dict[int, Joined] = {}
        self._apart: dict[int, int] = {}  # rows of the queue with a reason of their own, and their lanes
        self._order = ArrivalOrder()
        self._said: tuple[int, str, bool] = (WAIT_STEP, "", False)

    # -- the queue ----------------------------------------------------------------------------------------------------

    def arrive(self, row: int, arrival: float, now: float, *, takes_turns: bool = False) -> None:
        """A new row joins the queue; the time since its arrival went to the intake. `takes_turns`: into lane TURN."""
        if row >= len(self.state):
            self.state = np.concatenate([self.state, np.zeros(self._table.capacity - len(self.state), np.int8)])
        self._marks[row] = [Mark(arrival, State.INTAKE, self._table.step, 0)]
        self._order.join(row)
        self._join(row, TURN if takes_turns else QUEUE, now)

    def queue_waits_for(self, state: State, now: float, detail: str = "", *, shut: bool = False) -> None:
        """What the queue waits for from now on. `shut`: it is not the turn of those who take turns."""
        said = (state, detail, shut)
        if said == self._said:
            return
        self._said = said
        step = self._table.step
        queue, overtaken, turn = self._lanes
        queue.waits_for(state, detail, now, step)
        if state is State.WAIT_WINDOW:
            overtaken.waits_for(state, detail, now, step)
        else:
            overtaken.waits_for(State.WAIT_POLICY, "later ones went first", now, step)
        if shut and state is not State.WAIT_WINDOW:
            turn.waits_for(State.WAIT_CADENCE, "another class waits", now, step)
        else:
            turn.waits_for(state, detail, now, step)

    def set_apart(self, refused: Mapping[int, tuple[State, str]], now: float) -> None:
        """The rows of the queue that could not come for a reason of their own, which is not their lane's."""
        for row in [row for row in self._apart if row not in refused]:
            self._join(row, self._apart.pop(row), now)
        for row, (state, detail) in refused.items():
            lane = int(self.state[row]) - LANED
            if lane >= 0 and self._lanes[lane].turn.state != state:
                self._leave(row)
                self._apart[row] = lane
            if row in self._apart and self.state[row] != state:
                note(self._marks[row], Mark(now, state, self._table.step, self._served(row), detail))
                self.state[row] = state

    def boarded(self, rows: Longs, now: float) -> None:
        """Rows int64[n] have been admitted. Whose places they took is held back from now on."""
        passing = self._table.backfilled[rows]
        places = 0
        for row, passes in zip(rows.tolist(), passing.tolist(), strict=True):
            if passes:
                self._order.leave(row)
            else:
                places += self._order.take(row)
        for _ in range(places):
            row = self._order.advance()
            if row is None:
                continue
            if self._apart.get(row) == QUEUE:
                self._apart[row] = OVERTAKEN
            elif self.state[row] == LANED + QUEUE:
                self._leave(row)
                self._join(row, OVERTAKEN, now)

    def hold(self, row: int, state: State, now: float, detail: str = "") -> None:
        """Keeps a row that waits out of the queue, in a state of its own, until `release`."""
        self._order.leave(row)
        self.enter(np.array([row]), state, now, detail)

    def release(self, row: int, now: float, *, takes_turns: bool = False) -> None:
        """A row that was held joins the queue."""
        self._order.join(row)
        self._join(row, TURN if takes_turns else QUEUE, now)

    def regroup(self, rows: Longs, takes_turns: npt.NDArray[np.bool_], now: float) -> None:
        """Another policy: who of rows int64[n] takes turns from now on."""
        for row, takes in zip(rows.tolist(), takes_turns.tolist(), strict=True):
            lane = self._apart.get(row, int(self.state[row]) - LANED)
            wanted = TURN if takes else QUEUE
            if lane not in (QUEUE, TURN) or lane == wanted:
                continue
            if row in self._apart:
                self._apart[row] = wanted
            else:
                self._leave(row)
                self._join(row, wanted, now)

    def _join(self, row: int, lane: int, now: float) -> None:
        self.state[row] = LANED + lane
        self._lanes[lane].size += 1
        self._joined[row] = Joined(now, self._table.step, self._lanes[lane].turn)

    def _leave(self, row: int) -> None:
        """Takes the marks along that its lane has made meanwhile."""
        lane = self._lanes[int(self.state[row]) - LANED]
        lane.size -= 1
        for mark in lane.marks(self._joined.pop(row), self._served(row)):
            note(self._marks[row], mark)

    # -- on board -----------------------------------------------------------------------------------------------------

    def enter(
        self, rows: Longs, state: int | npt.NDArray[np.int8], now: float, detail: str = "", step: int | None = None
    ) -> None:
        """Rows int64[n] go into `state` (one for all, or int8[n]); rows from the queue leave it.

        `step` is the first step of that (None: the one that is being put together).
        """
        changed = self.state[rows] != state
        if not np.count_nonzero(changed):
            return
        rows = rows[changed]
        states = np.broadcast_to(np.asarray(state, np.int8), changed.shape)[changed]
        first = self._table.step if step is None else step
        for row, new in zip(rows.tolist(), states.tolist(), strict=True):
            if self.state[row] >= LANED:
                self._leave(row)
            self._apart.pop(row, None)
            note(self._marks[row], Mark(now, new, first, self._served(row), detail))
        self.state[rows] = states

    def _served(self, row: int) -> int:
        """Tokens computed for it by the steps that have been collected, as far as they were wanted."""
        table = self._table
        return int(min(table.computed[row], table.length[row] - 1) + table.carried[row])

    # -- what came of it ----------------------------------------------------------------------------------------------

    def timeline(self, row: int, now: float, step: int | None = None) -> list[Span]:
        """All of it up to now; `step` is the first that it has no part in (None: the one being put together)."""
        marks = self._marks[row]
        if self.state[row] >= LANED:
            marks = marks.copy()
            for mark in self._lanes[int(self.state[row]) - LANED].marks(self._joined[row], self._served(row)):
                note(marks, mark)
        return spans(marks, Mark(now, 0, self._table.step if step is None else step, self._served(row)), LABELS)

    def end(self, row: int, now: float, step: int | None = None) -> list[Span]:
        """Its timeline; nothing is kept of it."""
        timeline = self.timeline(row, now, step)
        if self.state[row] >= LANED:
            self._lanes[int(self.state[row]) - LANED].size -= 1
            del self._joined[row]
        self._apart.pop(row, None)
        self._order.leave(row)
        del self._marks[row]
        self.state[row] = State.INTAKE
        return timeline

    @property
    def queue_state(self) -> State:
        return State(self._lanes[QUEUE].turn.state)

    @property
    def queue_detail(self) -> str:
        """Which limit."""
        return self._lanes[QUEUE].turn.detail

    @property
    def some_apart(self) -> bool:
        """Some of the queue have a reason of their own."""
        return bool(self._apart)

    @property
    def turns_wait(self) -> bool:
        """Some who take turns wait, and so do others."""
        queue, overtaken, turn = self._lanes
        return turn.size > 0 and (queue.size + overtaken.size > 0 or any(lane != TURN for lane in self._apart.values()))

    def reasons(self, waiting: Longs) -> dict[str, int]:
        """How many of the rows int64[n] of the queue wait for what."""
        counts: dict[str, int] = {}
        for lane in self._lanes:
            if lane.size:
                label = LABELS[lane.turn.state]
                counts[label] = counts.get(label, 0) + lane.size
        if sum(counts.values()) < len(waiting):
            states: Ints = self.state[waiting].astype(np.int32)
            for state, count in enumerate(np.bincount(states[states < LANED], minlength=len(State)).tolist()):
                if count:
                    counts[LABELS[state]] = counts.get(LABELS[state], 0) + count
        return counts

    def paused(self, running: Longs) -> dict[str, int]:
        """How many of the rows int64[n] on board wait for what."""
        counts = np.bincount(self.state[running], minlength=len(State)).tolist()
        return {LABELS[i]: count for i, count in enumerate(counts) if count and i not in (PREFILL, DECODE)}

    def check(self) -> None:
        """Raises AssertionError where lanes and rows do not add up."""
        for number, lane in enumerate(self._lanes):
            assert lane.size == np.count_nonzero(self.state == LANED + number), f"lane {number} is miscounted"
        assert len(self._joined) == sum(lane.size for lane in self._lanes), "a row of a lane is lost"
        assert len(self._marks) == len(self._table) - np.count_nonzero(self._table.phase == ENDED), (
            "marks are kept of nobody"
        )
