"""Longest prefix match."""

from __future__ import annotations

import numpy as np

from headway.core.policies.base import Policy
from headway.core.table import Floats, Rows


class Lpm(Policy):
    """Longest cached prefix first, so that what is remembered is used. Not bounded: one with no hit waits for all hits.

    `cached` is a hint: looked up on arrival and again whenever a request is among the next to go.
    """

    def score(self, queue: Rows, now: float) -> Floats:
        result: Floats = -queue.cached.astype(np.float64)
        return result
