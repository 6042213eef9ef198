"""Budget: how many tokens each row gets in a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.load import NOTHING, Load
from headway.core.step_time import StepTimeModel
from headway.core.table import Rows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step can still take: rows, and tokens; and the load that it has already."""

    rows: int
    tokens: int
    load: Load = NOTHING

    def beside(self, rows: Rows, tokens: Ints) -> StepLimits:
        """What is left when `rows` compute `tokens` int32[n] each, 0 for those that do not take part."""
        count, total = int(np.count_nonzero(tokens)), int(tokens.sum())
        return StepLimits(
            self.rows - count, max(0, self.tokens - total), _with(self.load, rows.target - rows.work, tokens)
        )


class Budget(Protocol):
    """Tokens for each of `rows` (in the policy's order), int32[n], 0 for those left out.

    `left`: what the step can still take. `openings`: how many of the queue may hope for tokens beside `ready`.
    """

    def openings(self, ready: Rows, left: StepLimits) -> int: ...

    def grant(self, rows: Rows, left: StepLimits, now: float) -> Ints: ...


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Rows that lack one token come first, so that no prompt delays them; prompts share what is left in chunks.

    The first `partial` prompts get equal shares, and what a short one does not need goes to the others; then the next
    prompts, one after the other.
    """

    partial: int = 1

    def openings(self, ready: Rows, left: StepLimits) -> int:
        return left.rows - int(np.count_nonzero(ready.work == 1))

    def grant(self, rows: Rows, left: StepLimits, now: float) -> Ints:
        work = rows.work
        tokens, prompts, spare = _decodes(work, left)
        tokens[prompts] = _chunks(work[prompts], spare, self.partial)
        return tokens


class LatencyBound:
    """As DecodeFirst, but a step that decodes gives prompts only as much as keeps it within what was promised to those
    who decode: the tightest of their own promises, `promise` seconds for those who have none.

    What a step will take is predicted by `model`; that it may take longer is allowed for by the model's own errors, so
    that SHARE of the steps keep the promise. Where the decodes alone would break it, prompts still get LEAST tokens a
    step, and twice as many after every PATIENCE steps in a row: none is starved.
    """

    SHARE = 0.995
    LEAST = 16
    PATIENCE = 16

    def __init__(self, model: StepTimeModel, promise: float, partial: int = 1) -> None:
        self.model = model
        self.promise = promise
        self.partial = partial
        self._margin = 1.0
        self._margin_for = 0
        self._starved = 0
        self._tightest = math.inf
        self._unpromised = False
        self._step = -1

    def openings(self, ready: Rows, left: StepLimits) -> int:
        return left.rows - int(np.count_nonzero(ready.work == 1))

    def grant(self, rows: Rows, left: StepLimits, now: float) -> Ints:
        work = rows.work
        tokens, prompts, spare = _decodes(work, left)
        self._note_promises(rows, tokens)
        if len(prompts) and spare > 0:
            starts = rows.target - work
            load = _with(left.load, starts, tokens)
            if load.rows:
                spare = self._affordable(load, starts[prompts], work[prompts], spare)
            tokens[prompts] = _chunks(work[prompts], spare, self.partial)
        return tokens

    def _note_promises(self, rows: Rows, tokens: Ints) -> None:
        """What those who decode were promised; a step may be put together in several grants."""
        if rows.step != self._step:
            self._step, self._tightest, self._unpromised = rows.step, math.inf, False
        own = rows.tpot[tokens == 1]
        if len(own):
            self._tightest = min(self._tightest, float(own.min()))
            self._unpromised |= math.isinf(own.max())

    def _kept(self) -> float:
        """Seconds within which the step must end."""
        if self._unpromised or math.isinf(self._tightest):
            return min(self._tightest, self.promise)
        return self._tightest

    def _affordable(self, load: Load, starts: Ints, work: Ints, most: int) -> int:
        """The most tokens that prompts may share beside `load`, at least LEAST and at most `most`."""
        if not self.model.fitted:
            return min(most, self.LEAST)
        target = self._kept() / self._allowance()
        low = self._about(load, starts[: self.partial].tolist(), most, target)
        while low > self.LEAST and self._seconds(load, starts, work, low) > target:
            low = low * 7 // 8
        if load.tokens > load.rows:  # the step has prompts already: these come late
            return low
        least = min(most, self.LEAST << min(20, self._starved // self.PATIENCE))
        self._starved = self._starved + 1 if low < self.LEAST else 0
        return max(low, least)

    def _about(self, load: Load, starts: list[int], most: int, target: float) -> int:
        """As much, if these few prompts share it evenly: a search without arrays."""
        sharing, before = len(starts), sum(starts)
        tokens, attended, rows, kv_tokens = load
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            chunk = max(0.0, middle / sharing - 1)
            shared = Load(
                tokens + middle, attended + chunk * (before + middle), rows + sharing, kv_tokens + before + middle
            )
            if self.model.predict(shared) <= target:
                low = middle
            else:
                high = middle
        return low

    def _seconds(self, load: Load, starts: Ints, work: Ints, tokens: int) -> float:
        return self.model.predict(_with(load, starts, _chunks(work, tokens, self.partial)))

    def _allowance(self) -> float:
        """The model's margin, asked for again now and then."""
        if self._margin_for == 0:
            self._margin = self.model.margin(self.SHARE)
        self._margin_for = (self._margin_for + 1) % 16
        return self._margin


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """As DecodeFirst, but a prompt is computed whole or not at all; one that is larger than the budget goes when it is
    the first."""

    def openings(self, ready: Rows, left: StepLimits) -> int:
        return left.rows - int(np.count_nonzero(ready.work == 1))

    def grant(self, rows: Rows, left: StepLimits, now: float) -> Ints:
        work = rows.work
        tokens, prompts, spare = _decodes(work, left)
        prompt_work = work[prompts]
        fits = np.cumsum(prompt_work) <= spare
        fits[:1] = spare > 0
        tokens[prompts] = np.where(fits, prompt_work, 0)
        return tokens


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prompts take what they need, in order; rows that lack one token share what is left."""

    def openings(self, ready: Rows, left: StepLimits) -> int:
        return left.rows

    def grant(self, rows: Rows, left: StepLimits, now: float) -> Ints:
        work = rows.work
        order = np.argsort(work == 1, kind="stable")[: left.rows]
        tokens = np.zeros(len(work), np.int32)
        tokens[order] = _one_by_one(work[order], left.tokens)
        return tokens


@dataclass(frozen=True, slots=True)
class Unbounded:
    """Every row gets all it lacks at once, as padded batches do."""

    def openings(self, ready: Rows, left: StepLimits) -> int:
        return left.rows

    def grant(self, rows: Rows, left: StepLimits, now: float) -> Ints:
        work = rows.work
        return np.where(np.arange(len(work)) < left.rows, work, 0).astype(np.int32)


def _decodes(work: Ints, left: StepLimits) -> tuple[Ints, Longs, int]:
    """One token for each row that lacks one; returns the tokens, the positions of the prompts that may still get some,
    and how many tokens there are for them."""
    tokens = np.zeros(len(work), np.int32)
    single = work == 1
    decodes = np.flatnonzero(single)[: min(left.rows, left.tokens)]
    tokens[decodes] = 1
    prompts = np.flatnonzero(~single)[: left.rows - len(decodes)]
    return tokens, prompts, left.tokens - len(decodes)


def _chunks(work: Ints, left: int, partial: int) -> Ints:
    """`left` tokens for prompts that lack `work`: the first `partial` share them, later ones get what remains."""
    tokens = np.zeros(len(work), np.int32)
    sharing = min(partial, len(work))
    for position in np.argsort(work[:sharing], kind="stable"):
        tokens[position] = min(int(work[position]), -(-left // sharing))
        left -= int(tokens[position])
        sharing -= 1
    tokens[partial:] = _one_by_one(work[partial:], left)
    return tokens


def _with(load: Load, starts: Ints, tokens: Ints) -> Load:
    """`load` and rows int32[n] beside it that compute `tokens` from `starts` on; 0 for those that do not take part."""
    tokens = tokens.astype(np.float64)
    context = (starts + tokens) * (tokens > 0)
    read = float(context.sum())
    return Load(
        load.tokens + float(tokens.sum()),
        load.attended + float(tokens @ context) - read,
        load.rows + float(np.count_nonzero(tokens)),
        load.kv_tokens + read,
    )


def _one_by_one(work: Ints, left: int) -> Ints:
    """As much as each lacks, in order, while it lasts."""
    before = np.cumsum(work) - work
    result: Ints = np.clip(left - before, 0, work)
    return result
