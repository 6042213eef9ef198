"""Budget: how many tokens each row gets in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.table import Rows


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step can still take: rows, and tokens."""

    rows: int
    tokens: int


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
        tokens[prompts] = self._chunks(work[prompts], spare)
        return tokens

    def _chunks(self, work: Ints, left: int) -> Ints:
        tokens = np.zeros(len(work), np.int32)
        sharing = min(self.partial, len(work))
        for position in np.argsort(work[:sharing], kind="stable"):
            tokens[position] = min(int(work[position]), -(-left // sharing))
            left -= int(tokens[position])
            sharing -= 1
        rest = work[self.partial :]
        tokens[self.partial :] = _one_by_one(rest, left)
        return tokens


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


def _one_by_one(work: Ints, left: int) -> Ints:
    """As much as each lacks, in order, while it lasts."""
    before = np.cumsum(work) - work
    result: Ints = np.clip(left - before, 0, work)
    return result
