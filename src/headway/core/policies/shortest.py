"""The shortest first, by three measures: the whole job, what remains of it, what is missing to the next token."""

from __future__ import annotations

import numpy as np

from headway.core.policies.aged import OVERTAKING, Aged
from headway.core.policies.base import Policy
from headway.core.table import Floats, Rows


class Sjf(Policy):
    """Shortest job first: prompt and predicted output. Not bounded: a long one waits as long as shorter ones come."""

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = (queue.prompt_len + queue.predicted).astype(np.float64)
        return result


class Srpt(Policy):
    """Shortest remaining processing time: uncached prefill and predicted decode. Not bounded: shorter ones overtake."""

    def score(self, queue: Rows, now: float) -> Floats:
        generated = queue.length - queue.prompt_len
        result: Floats = queue.work + np.maximum(queue.predicted - generated, 1).astype(np.float64)
        return result


class Shortest(Policy):
    """Least uncached work to the next token. Not bounded: a long prompt waits as long as shorter ones come.

    It needs no prediction of the output. Rows that decode lack one token, so they go first.
    """

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = queue.work.astype(np.float64)
        return result


class Default(Aged):
    """Least uncached work to the next token, aged: no short request waits for a giant, and no giant for ever."""

    def __init__(self, overtaking: int = OVERTAKING) -> None:
        super().__init__(Shortest(), overtaking)
