"""Budget: how many tokens each row gets in a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.core.batch import Ints
from headway.core.config import SchedulerConfig
from headway.core.table import Rows


class Budget(Protocol):
    """`grant(rows, now)` int32[n]: tokens for each of `rows` (in the policy's order), 0 for those left out."""

    def grant(self, rows: Rows, now: float) -> Ints: ...


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Rows that lack one token come first, so that no prompt delays them; prompts share what is left in chunks.

    The first `max_num_partial_prefills` prompts get equal shares, and what a short one does not need goes to the
    others; then the next prompts, one after the other. Without chunking a prompt is computed whole or not at all; one
    that is larger than the budget goes when it is the first.
    """

    config: SchedulerConfig

    def grant(self, rows: Rows, now: float) -> Ints:
        config, work = self.config, rows.work
        tokens = np.zeros(len(work), np.int32)
        single = work == 1
        decodes = np.flatnonzero(single)[: config.max_batch_size]
        tokens[decodes] = 1
        room = config.max_batch_size - len(decodes)
        if room == 0 or len(decodes) == len(work):
            return tokens
        prompts = np.flatnonzero(~single)[:room]
        left = config.max_num_batched_tokens - len(decodes)
        share = self._chunks if config.chunked_prefill else self._whole
        tokens[prompts] = share(work[prompts], left)
        return tokens

    def _chunks(self, work: Ints, left: int) -> Ints:
        tokens = np.zeros_like(work)
        sharing = min(self.config.max_num_partial_prefills, len(work))
        for position in np.argsort(work[:sharing], kind="stable"):
            tokens[position] = min(int(work[position]), -(-left // sharing))
            left -= int(tokens[position])
            sharing -= 1
        rest = work[self.config.max_num_partial_prefills :]
        before = np.cumsum(rest) - rest
        tokens[self.config.max_num_partial_prefills :] = np.clip(left - before, 0, rest)
        return tokens

    def _whole(self, work: Ints, left: int) -> Ints:
        fits = np.cumsum(work) <= left
        if len(fits):
            fits[0] = left > 0
        return np.where(fits, work, 0).astype(np.int32)
