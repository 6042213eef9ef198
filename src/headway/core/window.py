"""WaitWindow: how long a group that is not full is waited for."""

from __future__ import annotations

from headway.core.table import Rows


class WaitWindow:
    """A fixed window: closes `length` seconds after the first waiting request came."""

    def __init__(self, length: float) -> None:
        self.length = length

    def arrived(self, now: float) -> None:
        """A request has come."""

    def closes(self, queue: Rows, size: int, now: float) -> float:
        """When the window for `queue` (not empty, fewer than `size`) closes, in seconds on the engine's clock."""
        return float(queue.arrival.min()) + self.length
