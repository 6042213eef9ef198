"""What a policy is: a score."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from headway.core.batch import Bools, Ints, Longs
from headway.core.table import Floats, Rows

Array = TypeVar("Array", bound=npt.NDArray[Any])


class Policy(metaclass=ABCMeta):
    """`score` says who goes first; the other methods only tell what happens, for those that keep an account.

    `bounded`: the work of later arrivals served ahead of a request is at most `overtaking` tokens, and what was on
    board by then. A policy touches neither the table nor blocks nor queues. The first line of its docstring is what
    the command line shows.
    """

    bounded = False
    overtaking = 0
    pauses = False
    """Where rows are short the scores alone decide who gets them: those on board pause for those of lower score."""
    drifts = False
    """Scores are times: that of an equal request that comes a second later is higher by one."""

    @abstractmethod
    def score(self, queue: Rows, now: float) -> Floats:
        """Finite float64[n], lowest first; ties go by order of arrival. `queue` may be rows waiting or on board."""

    def rank(self, rows: Rows) -> Ints | None:
        """int32[n]: who has a lower one gets rows and tokens of a step before all others, even before those of a higher
        one who decode already: they pause. None where the policy knows no ranks."""
        return None

    def takes_turns(self, rows: Rows) -> Bools | None:
        """bool[n], of requests that have arrived: who is admitted, while others wait, only where it is `its_turn`. None
        where nobody is. Only what people are told depends on it."""
        return None

    def its_turn(self, step: int) -> bool:
        """Whether those who take turns may be admitted in this step."""
        return True

    def counters(self) -> Floats | None:
        """float64[k]: service by tenant's code as the policy accounts for it; None where it keeps no such account."""
        return None

    def arrived(self, rows: Rows, now: float) -> None:  # noqa: B027 - keeping an account is optional
        """Requests have joined the queue for the first time. Rows are reused: what was noted of them is void."""

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:  # noqa: B027 - keeping an account is optional
        """A step computes `tokens` int32[n] for each of rows; negative where it will not after all: rows of a ranked
        policy may be taken out of a step before its launch."""

    def ended(self, rows: Rows, now: float) -> None:  # noqa: B027 - keeping an account is optional
        """Requests have finished or were aborted."""


class Around(Policy):
    """Another policy with something of its own on top: what it does not say itself is that policy's."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.bounded, self.overtaking = policy.bounded, policy.overtaking
        self.pauses, self.drifts = policy.pauses, policy.drifts

    def score(self, queue: Rows, now: float) -> Floats:
        return self.policy.score(queue, now)

    def rank(self, rows: Rows) -> Ints | None:
        return self.policy.rank(rows)

    def takes_turns(self, rows: Rows) -> Bools | None:
        return self.policy.takes_turns(rows)

    def its_turn(self, step: int) -> bool:
        return self.policy.its_turn(step)

    def counters(self) -> Floats | None:
        return self.policy.counters()

    def arrived(self, rows: Rows, now: float) -> None:
        self.policy.arrived(rows, now)

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        self.policy.served(rows, tokens, now)

    def ended(self, rows: Rows, now: float) -> None:
        self.policy.ended(rows, now)


def standing(policy: Policy, rows: Rows) -> Ints | None:
    """int32[n]: the ranks by which some give their places and blocks up to others; None where nobody does, because the
    policy knows no ranks or lets rows pause instead."""
    return None if policy.pauses else policy.rank(rows)


def in_order(policy: Policy, rows: Rows) -> Longs:
    """The rows' numbers int64[n] in the policy's order, ties by order of arrival."""
    order = np.lexsort((rows.seq, policy.score(rows, rows.now)))
    result: Longs = rows.index[order]
    return result


def reaching(array: Array, index: int) -> Array:
    """The array, grown with zeros by doubling until it has this index: for what a policy notes of rows or tenants."""
    if index < len(array):
        return array
    grown = np.zeros(max(2 * len(array), index + 1), array.dtype)
    grown[: len(array)] = array
    return cast(Array, grown)
