"""StepTimeModel: how long a batch will take, learnt from the engine's own steps.

Six features suffice for a forward pass (measured errors around 1 %): a constant; tokens; chunk times context, for the
prompts' attention; rows; KV tokens read; and the tokens beyond the point where the device is saturated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headway.core.batch import Batch
from headway.core.table import Floats

NUM_FEATURES = 6
STRATA = 3
PER_STRATUM = 256
SATURATION_GRID = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FIT_AT = (8, 16, 32, 64, 128, 256)
FIT_EVERY = 512


class Load(NamedTuple):
    """What a step costs the device, in numbers: tokens computed (padding included), sum of chunk x context over the
    prompts, rows, and KV tokens read."""

    tokens: float
    attended: float
    rows: float
    kv_tokens: float

    @classmethod
    def of(cls, batch: Batch) -> Load:
        tokens = batch.num_tokens + batch.pad_tokens
        context = batch.starts + batch.num_tokens
        attended = np.dot(tokens.astype(np.float64), context)
        return cls(float(tokens.sum()), float(attended), float(len(tokens)), float(context.sum()))

    @property
    def stratum(self) -> int:
        """0 decode only, 1 mixed, 2 mostly prompts."""
        if self.tokens <= self.rows:
            return 0
        return 1 if self.tokens < 4 * self.rows else 2


class StepTimeModel:
    """Non-negative least squares on relative error over a reservoir of decode, mixed and prompt steps.

    `observe` what a step took; `predict` what one will. Deterministic: the reservoir keeps every step at first and then
    replaces at places that a fixed linear congruence names.
    """

    def __init__(self) -> None:
        self.coefficients: Floats = np.zeros(NUM_FEATURES)
        self.saturation = 1
        self.error = float("nan")
        self._loads = [np.zeros((PER_STRATUM, 4)) for _ in range(STRATA)]
        self._times = [np.zeros(PER_STRATUM) for _ in range(STRATA)]
        self._seen = [0] * STRATA
        self._lottery = 1

    @property
    def fitted(self) -> bool:
        return bool(self.coefficients.any())

    def predict(self, load: Load) -> float:
        """Seconds; 0 before the first fit."""
        c0, c_tokens, c_attended, c_rows, c_kv, c_over = self.coefficients.tolist()
        over = max(0.0, load.tokens - self.saturation)
        linear = c0 + c_tokens * load.tokens + c_attended * load.attended
        return float(linear + c_rows * load.rows + c_kv * load.kv_tokens + c_over * over)

    def observe(self, load: Load, seconds: float) -> None:
        """A step of this load took so long."""
        if seconds <= 0:
            return
        stratum = load.stratum
        place = self._place(stratum)
        self._seen[stratum] += 1
        if place < PER_STRATUM:
            self._loads[stratum][place] = load
            self._times[stratum][place] = seconds
        total = sum(self._seen)
        if total in FIT_AT or total % FIT_EVERY == 0:
            self.fit()

    def _place(self, stratum: int) -> int:
        """Where in the reservoir this step goes; past its end where it is not kept (algorithm R)."""
        seen = self._seen[stratum]
        if seen < PER_STRATUM:
            return seen
        self._lottery = (self._lottery * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._lottery >> 33) % (seen + 1)

    def fit(self) -> None:
        """Fits the coefficients to the reservoir, trying each saturation point of the grid."""
        kept = [min(seen, PER_STRATUM) for seen in self._seen]
        loads = np.concatenate([rows[:count] for rows, count in zip(self._loads, kept, strict=True)])
        times = np.concatenate([rows[:count] for rows, count in zip(self._times, kept, strict=True)])
        weights = 1.0 / times
        best = np.inf
        for saturation in SATURATION_GRID:
            matrix = _features(loads, saturation) * weights[:, None]
            solution = nnls(matrix, np.ones(len(times)))
            residual = matrix @ solution - 1.0
            error = float(residual @ residual)
            if error < best * (1 - 1e-6):
                best, self.coefficients, self.saturation = error, solution, saturation
                self.error = float(np.abs(residual).mean())


def _features(loads: Floats, saturation: int) -> Floats:
    """float64[n, 4] -> float64[n, 6]."""
    tokens, attended, rows, kv_tokens = loads.T
    over = np.maximum(0.0, tokens - saturation)
    return np.stack([np.ones(len(loads)), tokens, attended, rows, kv_tokens, over], axis=1)


def nnls(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimises |matrix x - target|, by the active set method of Lawson and Hanson (1974)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    gram, right = a.T @ a, a.T @ target
    gram += np.eye(len(right)) * 1e-12
    x = np.zeros(len(right))
    passive = np.zeros(len(right), np.bool_)
    for _ in range(10 * len(right)):
        gradient = right - gram @ x
        gradient[passive] = -np.inf
        if gradient.max() <= 1e-10 * max(1.0, np.abs(right).max()):
            break
        passive[int(gradient.argmax())] = True
        while True:
            trial = np.zeros(len(right))
            trial[passive] = np.linalg.solve(gram[np.ix_(passive, passive)], right[passive])
            if trial[passive].min() > 0:
                x = trial
                break
            falling = passive & (trial <= 0)
            step = float((x[falling] / (x[falling] - trial[falling])).min())
            x = x + step * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
    result: Floats = x / scale
    return result
