"""Highest response ratio next."""

from __future__ import annotations

from headway.core.policies.base import Policy
from headway.core.table import Floats, Rows


class Hrrn(Policy):
    """Highest response ratio next: (wait + work) / work. Not bounded: under overload ever shorter ones overtake.

    On uncached work, which is at least the one token to sample. The order does not depend on the unit of work, since
    (wait + work) / work = 1 + wait / work: tokens do as well as seconds.
    """

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = -queue.waited / queue.work
        return result
