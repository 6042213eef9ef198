"""Where each request's time goes: named states that sum to its end-to-end time by construction.

A row on board has a state of its own. The rows in the queue share one: at any moment they all wait for the same thing
(what stopped the last admission), so one running clock per reason serves a hundred thousand of them, and a request's
share is the difference between two readings.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

from headway.core.batch import Longs
from headway.core.table import Floats


class State(IntEnum):
    """What a request spends its time on. The names in lower case are what people read."""

    INTAKE = 0
    """On its way to the scheduler, which was busy with a step."""
    WAIT_STEP = 1
    """In the queue, until the next step is put together."""
    WAIT_ROW = 2
    """In the queue: the batch or the admitted set is full."""
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
    WAIT_QUOTA = 9
    """As many of its tenant are in flight as may be."""

    @property
    def label(self) -> str:
        return self.name.lower()


WAIT_STEP, WAIT_ROW, PREFILL, DECODE = State.WAIT_STEP, State.WAIT_ROW, int(State.PREFILL), int(State.DECODE)
"""Members by names of their own: in the hot paths an attribute of an enum costs more than what it is for."""
LABELS = tuple(state.label for state in State)


class Accounting:
    """State times of every row of a table, in seconds. Rows are its row numbers."""

    def __init__(self, capacity: int) -> None:
        self.state = np.zeros(capacity, np.int8)
        self._since = np.zeros(capacity, np.float64)
        self._times = np.zeros((capacity, len(State)), np.float64)
        self._queue_state = State.WAIT_STEP
        self._queue_since = 0.0
        self._queue_clock = np.zeros(len(State), np.float64)
        self._queued = np.zeros(capacity, np.bool_)

    def _reserve(self, row: int) -> None:
        while row >= len(self.state):
            self.state = np.concatenate([self.state, np.zeros_like(self.state)])
            self._since = np.concatenate([self._since, np.zeros_like(self._since)])
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._queued = np.concatenate([self._queued, np.zeros_like(self._queued)])

    @property
    def queue_state(self) -> State:
        return self._queue_state

    def arrive(self, row: int, arrival: float, now: float) -> None:
        """A new row joins the queue; the time since its arrival went to the intake."""
        self._reserve(row)
        self._times[row] = 0.0
        self._times[row, State.INTAKE] = now - arrival
        self._join_queue(row, now)

    def rejoin_queue(self, row: int, now: float) -> None:
        """A row that waited on its own account waits with the queue from now on."""
        self._times[row, self.state[row]] += now - self._since[row]
        self._join_queue(row, now)

    def queue_waits_for(self, state: State, now: float) -> None:
        """From now on the queue waits for this."""
        if state is not self._queue_state:
            self._queue_clock[self._queue_state] += now - self._queue_since
            self._queue_since = now
            self._queue_state = state

    def _reading(self, now: float) -> Floats:
        clock = self._queue_clock.copy()
        clock[self._queue_state] += now - self._queue_since
        return clock

    def _join_queue(self, row: int, now: float) -> None:
        self._times[row] -= self._reading(now)
        self.state[row] = State.WAIT_STEP  # not what the row's last owner did
        self._queued[row] = True

    def enter(self, rows: Longs, state: int | npt.NDArray[np.int8], now: float) -> None:
        """Rows int64[n] on board go into `state` (one for all, or int8[n]); rows from the queue leave it."""
        queued = rows[self._queued[rows]]
        if len(queued):
            self._times[queued] += self._reading(now)
            self._queued[queued] = False
            self._since[queued] = now
        self._times[rows, self.state[rows]] += now - self._since[rows]
        self._since[rows] = now
        self.state[rows] = state

    def queued(self, rows: Longs) -> npt.NDArray[np.bool_]:
        """bool[n]: which of the rows share the queue's state."""
        return self._queued[rows]

    def times(self, row: int, now: float) -> dict[str, float]:
        """Seconds by state up to now; the states that took none are left out."""
        spent = self._times[row].copy()
        if self._queued[row]:
            spent += self._reading(now)
        else:
            spent[self.state[row]] += now - self._since[row]
        return {LABELS[i]: float(t) for i, t in enumerate(spent) if t > 1e-12}
