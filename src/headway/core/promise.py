"""Promises: what a request still needs, and by when it must go on so that what it was promised can be kept."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.load import Load
from headway.core.step_time import StepTimeModel
from headway.core.table import Floats, Rows


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds: that a prompt's token adds to a step (`prefill`), that a step takes in which `rows` decode (`decode`),
    and that a step takes with the prompts that there lately were beside them (`step`)."""

    prefill: float = 1e-3
    decode: float = 3e-2
    step: float = 3e-2
    rows: float = 1.0

    @classmethod
    def of(cls, model: StepTimeModel) -> Pace:
        """As the model says of the loads that there lately were; a guess until it is fitted."""
        tokens, attended, rows, kv_tokens = typical = model.typical
        if not model.fitted or not rows:
            return cls()
        step = model.predict(typical)
        more = Load(tokens + PROMPT, attended + PROMPT * PROMPT, rows, kv_tokens + PROMPT)
        return cls(
            (model.predict(more) - step) / PROMPT, model.predict(Load(rows, 0.0, rows, kv_tokens)), step, max(1.0, rows)
        )


PROMPT = 128
"""Tokens of a prompt, whose cost stands for that of others."""


def remaining_outputs(rows: Rows) -> Floats:
    """float64[n]: tokens that each is still expected to generate, at least 1."""
    result: Floats = np.maximum(rows.predicted - (rows.length - rows.prompt_len), 1).astype(np.float64)
    return result


def costs(rows: Rows, pace: Pace) -> Floats:
    """float64[n]: seconds of a busy device that the rest of each will take."""
    result: Floats = rows.work * pace.prefill + remaining_outputs(rows) * (pace.decode / pace.rows)
    return result


def latest_start(rows: Rows, pace: Pace) -> Floats:
    """float64[n], seconds on the engine's clock: when each must go on at the latest to keep what it was promised;
    infinite where nothing was. Of an answer whose length nobody knows one token is taken to be left."""
    first = rows.first_token
    begun = ~np.isnan(first)
    remaining = np.where(rows.sure, remaining_outputs(rows), 1.0)
    to_first = rows.work * pace.prefill + pace.decode
    to_last = to_first + (remaining - 1) * pace.decode
    total = rows.length - rows.prompt_len + remaining
    paced = np.where(begun, first + rows.tpot * np.maximum(total - 1, 1), np.inf)
    first_due = np.where(begun, np.inf, rows.first_due)
    starts: Floats = np.minimum(first_due - to_first, np.minimum(rows.deadline, paced) - to_last)
    return starts
