"""The generator against its own definition in plain integers, and against what uniform and independent mean."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sampling.rng import uniforms

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def reference(seed: int, choice: int, position: int) -> float:
    h = mix((seed + GOLDEN) & MASK)
    h = mix(((h ^ choice) + GOLDEN) & MASK)
    h = mix(((h ^ position) + GOLDEN) & MASK)
    return ((h >> 12) + 0.5) / 2**52


def test_the_finaliser_is_splitmix64s():
    """The first outputs of SplitMix64 from state 0, as published with it."""
    assert [mix(GOLDEN * i & MASK) for i in (1, 2, 3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("seed", "choice", "position", "expected"),
    [(0, 0, 0, 0.13870941014555427), (42, 1, 17, 0.5047909800234777), (2**64 - 1, 127, 131_071, 0.6163035264998956)],
)
def test_known_values(seed: int, choice: int, position: int, expected: float):
    drawn = uniforms(np.array([seed], np.uint64), np.array([choice]), np.array([position]))
    assert drawn.tolist() == [expected]


@given(st.integers(0, MASK), st.integers(0, 127), st.integers(0, 2**31))
def test_equals_the_definition(seed: int, choice: int, position: int):
    drawn = uniforms(np.array([seed], np.uint64), np.array([choice]), np.array([position]))
    assert drawn.tolist() == [reference(seed, choice, position)]
    assert 0.0 < drawn[0] < 1.0


def test_a_negative_seed_is_its_residue():
    assert uniforms(np.array([-3]), 0, 5) == uniforms(np.array([2**64 - 3], np.uint64), 0, 5)


def test_order_and_company_change_nothing():
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(0, 2**63, 200), rng.integers(0, 10_000, 200)
    choices = rng.integers(0, 8, 200)
    together = uniforms(seeds, choices, positions)
    order = rng.permutation(200)
    assert (uniforms(seeds[order], choices[order], positions[order]) == together[order]).all()
    assert [uniforms(*each)[0] for each in zip(seeds, choices, positions, strict=True)] == together.tolist()


@pytest.mark.parametrize("along", ["seed", "choice", "position"])
def test_uniform_and_independent_of_the_neighbour(along: str):
    """Counting up any of the three: 100 bins by chi-square, and correlation with the next one."""
    count = 100_000
    where = {"seed": 7, "choice": 0, "position": 3} | {along: np.arange(count)}
    drawn = uniforms(where["seed"], where["choice"], where["position"])
    observed = np.bincount((drawn * 100).astype(int), minlength=100)
    chi_square = ((observed - count / 100) ** 2 / (count / 100)).sum()
    assert 60 < chi_square < 149  # 99 degrees of freedom: 0.1 % on either side
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 4 / np.sqrt(count)
