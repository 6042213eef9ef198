"""What a policy is: a score."""

from __future__ import annotations

from typing import Protocol

from headway.core.batch import Ints
from headway.core.table import Floats, Rows


class Policy(Protocol):
    """`score(queue, now)` float64[n], lowest first; ties go by order of arrival. A policy touches nothing else.

    `bounded`: the work of later arrivals served ahead of a request is at most some number of tokens.
    `served(rows, tokens, now)` tells it what a step granted (tokens int32[n]).
    """

    bounded: bool

    def score(self, queue: Rows, now: float) -> Floats: ...

    def served(self, rows: Rows, tokens: Ints, now: float) -> None: ...
