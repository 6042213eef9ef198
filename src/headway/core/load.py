"""Load: what a step costs a device, in the few numbers that its time depends on."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

STRATA = ("decode", "mixed", "prompts")


class Load(NamedTuple):
    """Tokens computed (padding included); attended, the sum over the rows of (chunk - 1) x context, which is 0 for
    decodes; rows; and KV tokens read."""

    tokens: float
    attended: float
    rows: float
    kv_tokens: float

    @classmethod
    def of(cls, starts: Ints, num_tokens: Ints, pad_tokens: Ints) -> Load:
        """Rows int32[n] that compute `num_tokens` from `starts` on, and `pad_tokens` beside."""
        tokens = num_tokens + pad_tokens
        context = starts + num_tokens
        rows, total, kv_tokens = len(tokens), float(np.add.reduce(tokens)), float(np.add.reduce(context))
        attended = 0.0
        if total > rows:  # who computes one token adds nothing
            attended = float(np.dot(tokens.astype(np.float64), context)) - kv_tokens
        return cls(total, attended, float(rows), kv_tokens)

    @property
    def stratum(self) -> int:
        """Its place in STRATA: 0 decode only, 1 mixed, 2 mostly prompts."""
        if self.tokens <= self.rows:
            return 0
        return 1 if self.tokens < 4 * self.rows else 2


NOTHING = Load(0.0, 0.0, 0.0, 0.0)
