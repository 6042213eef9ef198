"""What tokens are to be chosen from, in float64, one row at a time and by sorting: nothing of the code under test."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def probabilities(
    logits: Floats, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Floats:
    """Temperature, then min_p, top_k and top_p, each on what is left. Equal logits stay or go together."""
    p = softmax(np.asarray(logits, np.float64) / temperature)
    p[p < min_p * p.max()] = 0.0
    if 0 < top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0.0
    p /= p.sum()
    if top_p < 1.0:
        best = np.sort(p)[::-1]
        last = int((np.cumsum(best) < top_p).sum())
        p[p < best[min(last, len(best) - 1)]] = 0.0
    return p / p.sum()


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max())
    return e / e.sum()


def chi_square_limit(degrees: int) -> float:
    """What a chi-square variable exceeds once in 10,000 times (Wilson and Hilferty 1931)."""
    ninth = 2 / (9 * degrees)
    return degrees * (1 - ninth + 3.719 * ninth**0.5) ** 3
