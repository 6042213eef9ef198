"""Random numbers as a pure function of (seed, choice, position): no state, so nothing to save, send or get out of step.

The generator is counter based: each of the three numbers is mixed into 64 bits by the finaliser of SplitMix64 (Steele,
Lea and Flood 2014: "Fast splittable pseudorandom number generators"), in integers only, so that every machine draws the
same. In full, modulo 2**64:

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    h = mix(seed + G);  h = mix((h ^ choice) + G);  h = mix((h ^ position) + G)     with G = 0x9E3779B97F4A7C15
    uniform = (h >> 12 + 1/2) / 2**52
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: npt.ArrayLike, choices: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """float64 [n] in the open interval (0, 1) of n seeds, choices and positions (int64 or uint64 arrays, or broadcast).

    `position` is the token's in the whole sequence, prompt included.
    """
    seed, choice, position = np.broadcast_arrays(*(np.atleast_1d(_words(x)) for x in (seeds, choices, positions)))
    bits = _mix(seed + _GOLDEN)
    bits = _mix((bits ^ choice) + _GOLDEN)
    bits = _mix((bits ^ position) + _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _words(values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return np.asarray(values).astype(np.uint64)


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
