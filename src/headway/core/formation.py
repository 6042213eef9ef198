"""Formation: *when* requests may join the batch. Which go first is the policy's, how many tokens the budget's."""

from __future__ import annotations

from typing import Protocol

from headway.core.batch import Wait
from headway.core.table import Rows


class Formation(Protocol):
    """Says how many of the queue may join the running set now, or until when the doors stay shut."""

    def may_join(self, queue: Rows, running: Rows, now: float) -> int | Wait: ...


class Continuous:
    """Join and leave at every step: the metro. Whoever is waiting may come as long as there is room."""

    def may_join(self, queue: Rows, running: Rows, now: float) -> int | Wait:
        return len(queue)
