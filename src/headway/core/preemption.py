"""Preemption: who leaves under pressure, and whether its KV is copied away or computed anew.

Whether leaving helps at all is checked by the room first, and it names only rows that the policy places behind the one
who needs the room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.core.batch import Bools, Ints
from headway.core.kv_cache import blocks_for
from headway.core.step_time import StepTimeModel
from headway.core.table import Floats, Rows

GUARDED_STEPS = 32
"""Steps for which a row that has come back leaves only where nobody else's leaving would do."""

Victim = tuple[int, bool]
"""A position in the rows asked about, and whether its KV is to be swapped out."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """Somebody needs room.

    `gains` int32[n]: blocks of each row that nobody else holds; `kept` int32[n]: tokens at its beginning that others
    hold too, so that it finds them again. `wanted`: blocks to gain, or 0 where one row must leave whatever it holds.
    `host_free`: blocks of the host's memory that can be had; `block_size` in tokens; `limit`: seconds that bringing all
    of them back may cost.
    """

    gains: Ints
    kept: Ints
    wanted: int
    host_free: int
    block_size: int
    limit: float = math.inf


class Preemption(Protocol):
    """`victims`: who leaves, of `rows` (on board, in policy order), so that they gain what is wanted; nobody where that
    costs too much."""

    def victims(self, rows: Rows, pressure: Pressure, now: float) -> list[Victim]: ...


class LeastLoss:
    """Who leaves are those whose coming back costs the least time per block that it frees.

    Coming back costs computing the lost tokens again, by the step-time model, or copying the blocks out and in, by the
    measured time of a copy. `swap`: True swaps wherever the host has room, False never, None whichever is cheaper.
    Rows that have come back a short time ago leave last.
    """

    def __init__(self, model: StepTimeModel, swap: bool | None = None) -> None:
        self._model = model
        self._swap = swap

    def victims(self, rows: Rows, pressure: Pressure, now: float) -> list[Victim]:
        recompute = self._recompute(rows, pressure)
        held = blocks_for(rows.computed, pressure.block_size)
        blocks = (2 * held - pressure.kept // pressure.block_size).astype(np.float64)
        copying: Floats = blocks * self._model.copies.per_block
        swaps = self._swaps(recompute, copying, held, pressure.host_free)
        loss = np.where(swaps, copying, recompute)
        chosen = self._cheapest(rows, loss, pressure)
        if self._model.fitted and loss[chosen].sum() > pressure.limit:
            return []
        left = pressure.host_free
        result = []
        for position in chosen:
            fits = bool(swaps[position]) and held[position] <= left
            left -= int(held[position]) if fits else 0
            result.append((position, fits))
        return result

    def _recompute(self, rows: Rows, pressure: Pressure) -> Floats:
        """float64[n]: seconds to compute again what each row would lose; tokens before anything is known of steps."""
        if self._model.fitted:
            return self._model.prefill_seconds(pressure.kept, rows.computed)
        tokens: Floats = (rows.computed - pressure.kept).astype(np.float64)
        return tokens

    def _swaps(self, recompute: Floats, copying: Floats, held: Ints, host_free: int) -> Bools:
        fits: Bools = (held <= host_free) & (held > 0)
        if self._swap is None:
            return fits & (copying < recompute)
        return fits & self._swap

    def _cheapest(self, rows: Rows, loss: Floats, pressure: Pressure) -> list[int]:
        """The rows that together gain enough: the best by loss per block, less those that turn out not to be needed;
        or one alone, where that loses less."""
        gains, wanted = pressure.gains, pressure.wanted
        guarded = rows.guarded_until > rows.step
        last_first = -np.arange(len(loss))
        if wanted <= 0:
            return [int(np.lexsort((last_first, loss, guarded))[0])]
        per_block = loss / np.maximum(gains, 1)
        order = np.lexsort((last_first, per_block, guarded))
        chosen, gained = [], 0
        for position in order[gains[order] > 0].tolist():
            if gained >= wanted:
                break
            chosen.append(position)
            gained += int(gains[position])
        for position in sorted(chosen, key=lambda position: -loss[position]):
            if gained - int(gains[position]) >= wanted:
                chosen.remove(position)
                gained -= int(gains[position])
        alone = (~guarded & (gains >= wanted)).nonzero()[0]
        if len(alone) and len(chosen) > 1:
            best = int(alone[np.lexsort((last_first[alone], loss[alone]))[0]])
            if loss[best] <= loss[chosen].sum():
                return [best]
        return chosen
