"""Draws against exact probabilities, filters against sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.sampling.draw import Shape, draw
from tests.sampling.reference import chi_square_limit, probabilities

FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


def shape(count: int, vocab_size: int, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Shape:
    return Shape(
        torch.full((count,), temperature, dtype=torch.float32),
        torch.full((count,), top_k or vocab_size, dtype=torch.int64),
        torch.full((count,), top_p, dtype=torch.float64),
        torch.full((count,), min_p, dtype=torch.float32),
    )


def drawn_from(logits: np.ndarray, uniforms: np.ndarray, **filters: float) -> np.ndarray:
    rows = torch.from_numpy(logits.astype(np.float32)).expand(len(uniforms), -1)
    filters_of_all = shape(len(uniforms), rows.shape[1], **filters)
    return draw(rows, rows.amax(-1), filters_of_all, torch.from_numpy(uniforms)).numpy()


def some_logits(vocab_size: int, seed: int = 0, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab_size) * spread).astype(np.float32)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_frequencies_are_the_exact_probabilities(filters: dict):
    logits, count = some_logits(60), 20_000
    tokens = drawn_from(logits, np.random.default_rng(1).random(count), **filters)
    expected = probabilities(logits, **filters) * count
    observed = np.bincount(tokens, minlength=60)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    chi_square = ((observed - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < chi_square_limit(max(1, common.sum() - 1))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [3, 255, 256, 257, 5000])
def test_a_draw_inverts_the_distribution_function_in_order_of_ids(vocab_size: int, filters: dict):
    logits, uniforms = some_logits(vocab_size), (np.arange(500) + 0.5) / 500
    tokens = drawn_from(logits, uniforms, **filters)
    ends = np.cumsum(probabilities(logits, **filters))
    assert (ends[tokens] > uniforms - 1e-5).all()
    assert (np.concatenate([[0.0], ends])[tokens] < uniforms + 1e-5).all()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("top_k", [0, 10, 300, 5000])
def test_filters_that_need_more_than_the_first_candidates(top_k: int, top_p: float):
    """Almost flat: the nucleus has thousands of tokens."""
    logits, uniforms = some_logits(8000, spread=0.1), (np.arange(100) + 0.5) / 100
    tokens = drawn_from(logits, uniforms, top_k=top_k, top_p=top_p)
    kept = probabilities(logits, top_k=top_k, top_p=top_p)
    ends = np.cumsum(kept)
    assert (kept[tokens] > 0).all()
    assert (ends[tokens] > uniforms - 1e-5).all()
    assert (np.concatenate([[0.0], ends])[tokens] < uniforms + 1e-5).all()


def test_ties_stay_or_go_together():
    logits = np.array([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    uniforms = (np.arange(1000) + 0.5) / 1000
    assert set(drawn_from(logits, uniforms, top_k=2)) == {1, 2, 3, 4}
    assert set(drawn_from(logits, uniforms, top_p=0.5)) == {1, 2, 3, 4}


@given(st.data())
def test_the_support_is_what_sorting_says(data: st.DataObject):
    vocab_size = data.draw(st.integers(1, 40))
    tenths = data.draw(st.lists(st.integers(-60, 60), min_size=vocab_size, max_size=vocab_size))
    logits = np.array(tenths) / 10
    filters = {
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 2.0])),
        "top_k": data.draw(st.integers(0, vocab_size)),
        "top_p": data.draw(st.sampled_from([0.2, 0.55, 0.93, 1.0])),
        "min_p": data.draw(st.sampled_from([0.0, 0.013, 0.21])),
    }
    expected = probabilities(logits, **filters)
    # a cumulated probability just at top_p may fall on either side of it
    best = np.sort(probabilities(logits, **(filters | {"top_p": 1.0})))[::-1].cumsum()
    if (np.abs(best - filters["top_p"]) < 1e-5).any():
        return
    tokens = drawn_from(logits, (np.arange(1000) + 0.5) / 1000, **filters)
    assert set(tokens) <= set(np.flatnonzero(expected))
    assert set(tokens) >= set(np.flatnonzero(expected > 2e-3))


@pytest.mark.parametrize("uniform", [2.0**-53, 1 - 2.0**-53])
def test_the_ends_of_the_interval_give_tokens_that_can_be_drawn(uniform: float):
    logits = some_logits(1000)
    kept = probabilities(logits, top_k=5)
    token = drawn_from(logits, np.array([uniform]), top_k=5)[0]
    assert token == (np.flatnonzero(kept)[0] if uniform < 0.5 else np.flatnonzero(kept)[-1])


def test_tiny_temperatures_are_greedy_and_huge_ones_flat():
    logits = some_logits(50)
    uniforms = (np.arange(500) + 0.5) / 500
    assert set(drawn_from(logits, uniforms, temperature=1e-30)) == {logits.argmax()}
    assert np.bincount(drawn_from(logits, uniforms, temperature=1e6), minlength=50).tolist() == [10] * 50


def test_forbidden_tokens_are_never_drawn():
    logits = some_logits(100)
    logits[::2] = -np.inf
    assert (drawn_from(logits, (np.arange(500) + 0.5) / 500, top_p=0.999) % 2 == 1).all()
