"""Preemption: who leaves under pressure. Whether it helps at all is checked by the scheduler first."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headway.core.batch import Ints
from headway.core.table import Rows


class Preemption(Protocol):
    """`victims(rows, now)` int32[n]: positions in `rows` (on board, in policy order) in the order to evict them."""

    def victims(self, rows: Rows, now: float) -> Ints: ...


class LastInOrder:
    """The least urgent by the policy goes first; it is computed again when it comes back."""

    def victims(self, rows: Rows, now: float) -> Ints:
        return np.arange(len(rows) - 1, -1, -1, dtype=np.int32)
