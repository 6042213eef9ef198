"""Formation: *when* requests may join the batch. Which go first is the policy's, how many tokens the budget's."""

from __future__ import annotations

import math

import numpy as np

from headway.core.batch import Ints, Wait
from headway.core.kv_cache import blocks_for
from headway.core.table import Rows
from headway.core.window import WaitWindow


class Formation:
    """What all have in common; by itself the doors are open whenever there is room.

    `lingers`: rows that have ended keep their places, and are computed on, until the last of their group has ended.
    """

    lingers = False

    def arrived(self, at: float) -> None:
        """A request came at this time."""

    def emptied(self, now: float) -> None:
        """The last row that lingered has left."""

    def may_join(self, queue: Rows, board: Rows, more: bool, now: float) -> int | Wait:
        """How many of the queue may join those on board now, or until when the doors stay shut.

        `more` is False where it is known that nobody else will come.
        """
        return len(queue)

    def claims(self, joining: Rows, block_size: int) -> tuple[Ints, Ints]:
        """KV blocks that joining costs, int32[n] each: what all of them up to this one will hold together, and what
        each must be given at once if this one is the last to join."""
        together = np.cumsum(blocks_for(joining.target, block_size) - joining.shared, dtype=np.int32)
        return together, np.zeros(len(together), np.int32)

    def pad(self, tokens: Ints) -> Ints:
        """Throwaway tokens that are computed beside each row's own, int32[n] -> int32[n]."""
        return np.zeros(len(tokens), np.int32)

    def launch_at(self, end: float, host_time: float) -> float:
        """When to launch a prepared step, if the step under way is expected to end at `end` and launching takes
        `host_time`; until then late arrivals may board it."""
        return -math.inf


class Continuous(Formation):
    """Join and leave at every step: the metro. Whoever is waiting may come as long as there is room."""


class InFlight(Formation):
    """Continuous, and the doors of a prepared step stay open until just before the device is ready for it."""

    def launch_at(self, end: float, host_time: float) -> float:
        return end - host_time


class Padded(Formation):
    """A group leaves when it is full or its window closes, and runs until all have ended: the bus.

    The batch is a rectangle: short rows are padded to the longest, ended rows go on computing, and each row holds KV
    for the longest prompt and the longest answer of the group. The waste is real, and counted.
    """

    lingers = True

    def __init__(self, size: int, window: WaitWindow) -> None:
        if size < 1:
            raise ValueError(f"a group needs at least one request, got size {size}")
        self.size = size
        self.window = window
        self._left = math.nan

    def arrived(self, at: float) -> None:
        self.window.arrived(at)

    def emptied(self, now: float) -> None:
        if not math.isnan(self._left):  # else it was another formation's group
            self.window.ran(now - self._left)

    def may_join(self, queue: Rows, board: Rows, more: bool, now: float) -> int | Wait:
        if len(board):
            return Wait(math.inf, "the group on board has not ended")
        if len(queue) < self.size and more:
            closes = self.window.closes(queue, self.size, now)
            if closes > now:
                return Wait(closes, "the group is not full and its window is open")
        self._left = now
        return min(self.size, len(queue))

    def claims(self, joining: Rows, block_size: int) -> tuple[Ints, Ints]:
        prompt: Ints = np.maximum.accumulate(joining.prompt_len)
        answer: Ints = np.maximum.accumulate(joining.limit - joining.prompt_len)
        side = blocks_for(prompt + answer - 1, block_size)  # a last token's KV is not needed
        rows = np.arange(1, len(side) + 1, dtype=np.int32)
        return (side * rows).astype(np.int32), side

    def pad(self, tokens: Ints) -> Ints:
        padding: Ints = tokens.max() - tokens
        return padding
