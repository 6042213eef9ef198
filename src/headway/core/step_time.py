"""StepTimeModel: how long a batch will take, learnt from the engine's own steps.

Six features suffice for a forward pass (measured errors around 1 %): a constant; tokens; chunk times context, for the
prompts' attention; rows; KV tokens read; and the tokens beyond the point where the device is saturated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from headway.core.batch import Bools, Ints
from headway.core.load import NOTHING, STRATA, Load
from headway.core.swap import CopyTime
from headway.core.table import Floats

NUM_FEATURES = 6
PER_STRATUM = 256
MEMORY = 8 * PER_STRATUM
"""Steps of a stratum that the reservoir stands for: older ones fade, so that it follows a device that changes."""
SATURATION_GRID = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FIT_AT = (8, 16, 32, 64, 128, 256)
FIT_EVERY = 512
FEW, UNSURE = 64, 1.25
SOON, ASK_EVERY = 0.05, 16
EARLY = 0.75
"""`at_least`: the share of steps that take less, the steps after which it is asked for again, and the
share of a prediction that is believed until then."""
LOOK_EVERY = 8
"""Steps after which the typical load is brought up to date."""


class StepTimeModel:
    """Non-negative least squares on relative error over a reservoir of decode, mixed and prompt steps.

    `observe` what a step took; `predict` what one will. The very first fit is made at once, the later ones a saturation
    point a step, so that none holds up the engine. Deterministic: the reservoir keeps every step at first and then
    replaces at places that a fixed linear congruence names.
    """

    def __init__(self) -> None:
        self.copies = CopyTime()
        self.saturation = 1
        self.typical = NOTHING
        """What a step's load was lately, on average."""
        self._coefficients = (0.0,) * NUM_FEATURES
        self._loads = [np.zeros((PER_STRATUM, 4)) for _ in STRATA]
        self._times = [np.zeros(PER_STRATUM) for _ in STRATA]
        self._ratios = [np.zeros(PER_STRATUM) for _ in STRATA]
        self._seen = [0] * len(STRATA)
        self._predicted = [0] * len(STRATA)
        self._soonest = [EARLY] * len(STRATA)
        self._soonest_after = [0] * len(STRATA)
        self._until_fit = FIT_EVERY
        self._lottery = 1
        self._fitting: Iterator[None] | None = None

    @property
    def coefficients(self) -> Floats:
        """Seconds per unit of each feature, float64[6]."""
        return np.array(self._coefficients)

    @property
    def fitted(self) -> bool:
        return any(self._coefficients)

    def predict(self, load: Load) -> float:
        """Seconds; 0 before the first fit."""
        c0, c_tokens, c_attended, c_rows, c_kv, c_over = self._coefficients
        tokens, attended, rows, kv_tokens = load
        over = tokens - self.saturation
        linear = c0 + c_tokens * tokens + c_attended * attended + c_rows * rows + c_kv * kv_tokens
        return linear + c_over * over if over > 0 else linear

    def prefill_seconds(self, start: Ints, end: Ints) -> Floats:
        """float64[n]: what computing tokens [start, end) of each row adds to steps that are computed anyway.

        A token at position p attends to p others, of which the step reads the KV; the device is saturated beside.
        """
        _, c_tokens, c_attended, _, _, c_over = self._coefficients
        tokens = (end - start).astype(np.float64)
        result: Floats = (c_tokens + c_over) * tokens + c_attended * tokens * (start + end) / 2
        return result

    def at_least(self, load: Load) -> float:
        """Seconds that a step of this load takes in most cases or more; 0 before the first fit."""
        stratum = load.stratum
        if self._predicted[stratum] >= self._soonest_after[stratum]:
            self._soonest_after[stratum] = self._predicted[stratum] + ASK_EVERY
            ratios = self._ratios[stratum][: self._predicted[stratum]]
            self._soonest[stratum] = float(np.quantile(ratios, SOON)) if len(ratios) >= ASK_EVERY else EARLY
        return self._soonest[stratum] * self.predict(load)

    def observe(self, load: Load, seconds: float) -> None:
        """A step of this load took so long."""
        if seconds <= 0:
            return
        stratum = load.stratum
        predicted = self.predict(load)
        if predicted > 0:
            self._ratios[stratum][self._predicted[stratum] % PER_STRATUM] = seconds / predicted
            self._predicted[stratum] += 1
        place = self._place(stratum)
        self._seen[stratum] += 1
        if place < PER_STRATUM:
            self._loads[stratum][place] = load
            self._times[stratum][place] = seconds
        self._until_fit -= 1
        if self._until_fit % LOOK_EVERY == 0:
            self._note_typical(load)
        if self._fitting is not None:
            next(self._fitting, None)
        elif self._seen[stratum] in FIT_AT or self._until_fit <= 0:
            self._begin_fit()

    def _note_typical(self, load: Load) -> None:
        share = 0.1 if self.typical.rows else 1.0
        self.typical = Load(*((1 - share) * old + share * new for old, new in zip(self.typical, load, strict=True)))

    def _place(self, stratum: int) -> int:
        """Where in the reservoir this step goes; past its end where it is not kept (algorithm R, the past fading)."""
        seen = self._seen[stratum]
        if seen < PER_STRATUM:
            return seen
        self._lottery = (self._lottery * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._lottery >> 33) % (min(seen, MEMORY) + 1)

    def _begin_fit(self) -> None:
        if self.fitted:
            self._until_fit = FIT_EVERY
            self._fitting = self._fit()
        else:
            self.fit()

    def fit(self) -> None:
        """Fits the coefficients to the reservoir, now and at once."""
        self._until_fit = FIT_EVERY
        for _ in self._fit():
            pass

    def _fit(self) -> Iterator[None]:
        """One saturation point of the grid after the other; the best is taken in the end."""
        kept = [min(seen, PER_STRATUM) for seen in self._seen]
        loads = np.concatenate([rows[:count] for rows, count in zip(self._loads, kept, strict=True)])
        times = np.concatenate([rows[:count] for rows, count in zip(self._times, kept, strict=True)])
        most = loads[:, 0].max(initial=1.0)
        grid = np.array([point for point in SATURATION_GRID if point == 1 or point < most], np.float64)
        tokens = loads[:, :1]
        features = np.concatenate([np.ones_like(tokens), loads, np.maximum(tokens - grid, 0.0)], axis=1)
        features /= times[:, None]
        gram, right = features.T @ features, features.sum(axis=0)
        best, coefficients, saturation = np.inf, self._coefficients, self.saturation
        yield
        solution = np.array(coefficients)
        for i, point in enumerate(grid.tolist()):
            chosen = [0, 1, 2, 3, 4, 5 + i]
            part = gram[np.ix_(chosen, chosen)]
            solution = nnls_gram(part, right[chosen], solution > 0)
            error = float(len(times) - 2 * right[chosen] @ solution + solution @ part @ solution)
            if error < best - 1e-6 * abs(best) or best == np.inf:
                best, coefficients, saturation = error, tuple(solution.tolist()), int(point)
            yield
        self._coefficients, self.saturation = coefficients, saturation
        self._fitting = None

    def residuals(self, stratum: int) -> Floats:
        """float64[n]: seconds over prediction, by the coefficients of now, of the steps in this stratum's reservoir;
        empty before the first fit."""
        kept = min(self._seen[stratum], PER_STRATUM) if self.fitted else 0
        predicted = np.array([self.predict(Load(*row)) for row in self._loads[stratum][:kept].tolist()])
        ratios: Floats = self._times[stratum][:kept] / predicted
        return ratios

    @property
    def error(self) -> float:
        """Mean relative error of the latest predictions, made before the step was known; nan before there are any."""
        ratios = np.concatenate([ratios for _, ratios in self._latest()])
        return float(np.abs(ratios - 1).mean()) if len(ratios) else math.nan

    def margin(self, share: float) -> float:
        """By what factor a step with prompts may exceed its prediction in `share` of cases; UNSURE if few are known."""
        ratios = np.concatenate([ratios for name, ratios in self._latest() if name != "decode"])
        known = float(np.quantile(ratios, share)) if len(ratios) else 1.0
        return max(known, UNSURE) if len(ratios) < FEW else max(known, 1.0)

    def _latest(self) -> list[tuple[str, Floats]]:
        """Seconds over predicted seconds of the latest predicted steps, by stratum."""
        counts = [min(count, PER_STRATUM) for count in self._predicted]
        return [(STRATA[i], self._ratios[i][:count]) for i, count in enumerate(counts)]


def nnls(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0, float64[k], that minimises |matrix x - target| for float64[n, k] and float64[n]."""
    return nnls_gram(matrix.T @ matrix, matrix.T @ target)


def nnls_gram(gram: Floats, right: Floats, guess: Bools | None = None) -> Floats:
    """The x >= 0 that minimises x gram x / 2 - right x, by the active set method of Lawson and Hanson (1974).

    `guess` bool[k]: where x is positive; a good one saves most of the work, a wrong one does no harm.
    """
    size = len(right)
    scale = np.sqrt(gram.diagonal())
    scale[scale == 0] = 1.0
    gram = gram / np.outer(scale, scale) + np.eye(size) * 1e-12
    right = right / scale
    least = 1e-10 * max(1.0, float(np.abs(right).max()))
    x = np.zeros(size)
    passive = np.zeros(size, np.bool_) if guess is None else guess.copy()
    if passive.any():
        x = _solve_within(gram, right, x, passive)
    barred = np.zeros(size, np.bool_)
    for _ in range(10 * size):
        gradient = right - gram @ x
        gradient[passive | barred] = -np.inf
        entering = int(gradient.argmax())
        if gradient[entering] <= least:
            break
        passive[entering] = True
        x = _solve_within(gram, right, x, passive)
        if passive[entering]:
            barred[:] = False
        else:  # it promised a gain that rounding made up: not again before something else has changed
            barred[entering] = True
    result: Floats = x / scale
    return result


def _solve_within(gram: Floats, right: Floats, x: Floats, passive: Bools) -> Floats:
    """From x towards the best of the `passive` coordinates; those that would turn negative on the way drop out."""
    while True:
        inside = passive.nonzero()[0]
        trial = np.zeros(len(right))
        trial[inside] = np.linalg.solve(gram[np.ix_(inside, inside)], right[inside])
        if trial[inside].min() > 0:
            return trial
        falling = inside[trial[inside] <= 0]
        step = float((x[falling] / (x[falling] - trial[falling])).min())
        x = x + step * (trial - x)
        passive &= x > 1e-15
        x[~passive] = 0.0
        if not passive.any():
            return x
