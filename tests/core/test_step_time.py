"""The step-time model against devices with known coefficients, and its solver against the conditions of optimality."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core import step_time
from headway.core.batch import Batch
from headway.core.load import STRATA, Load
from headway.core.step_time import PER_STRATUM, StepTimeModel, nnls, nnls_gram

TRUE = np.array([2e-3, 1e-5, 1e-9, 2e-5, 2e-8, 2e-5])
SATURATED_AT = 256


def true_time(load: Load) -> float:
    features = [1.0, *load, max(0.0, load.tokens - SATURATED_AT)]
    return float(TRUE @ features)


def some_load(rng: np.random.Generator, stratum: int) -> Load:
    rows, context = int(rng.integers(1, 64)), int(rng.integers(10, 1000))
    extra = [0, int(rng.integers(1, 2 * rows + 1)), int(rng.integers(3 * rows + 1, 3 * rows + 2000))][stratum]
    return Load(rows + extra, extra * context, rows, rows * context)


def learn(model: StepTimeModel, steps: int, noise: float, seed: int = 0, slower: float = 1.0) -> None:
    rng = np.random.default_rng(seed)
    for i in range(steps):
        load = some_load(rng, i % len(STRATA))
        model.observe(load, slower * true_time(load) * float(np.exp(noise * rng.normal())))


def batch(starts: list[int], tokens: list[int], pads: list[int]) -> Batch:
    starts_, tokens_, pads_ = (np.array(values, np.int32) for values in (starts, tokens, pads))
    none = np.zeros(0, np.int32)
    rows = np.arange(len(starts))
    return Batch(0, rows, none, starts_, tokens_, tokens_ > 0, pads_, (), none, none, none)


def test_the_load_of_a_mixed_batch():
    load = batch([100, 7, 0], [1, 1, 16], [0, 0, 0]).load
    assert load == Load(tokens=18, attended=15 * 16, rows=3, kv_tokens=101 + 8 + 16)
    assert STRATA[load.stratum] == "prompts"


def test_padding_is_computed_too():
    load = batch([0, 0], [3, 9], [6, 0]).load
    assert load == Load(tokens=18, attended=8 * 3 + 8 * 9, rows=2, kv_tokens=12)


def test_decodes_attend_to_what_they_read_and_nothing_more():
    load = batch([40, 50], [1, 1], [0, 0]).load
    assert load == Load(tokens=2, attended=0, rows=2, kv_tokens=92)
    assert STRATA[load.stratum] == "decode"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(6, 40), st.booleans())
def test_nnls_is_optimal(seed, unknowns, rows, collinear):
    """The conditions of Karush, Kuhn and Tucker: nothing negative, no gain left, and none where x is positive."""
    rng = np.random.default_rng(seed)
    matrix = rng.uniform(0, 1, (rows, unknowns)) * 10.0 ** rng.integers(-3, 6, unknowns)
    if collinear:
        matrix[:, -1] = matrix[:, 0] * 3
    target = rng.normal(1, 1, rows)
    x = nnls(matrix, target)
    gradient = matrix.T @ (target - matrix @ x) / np.linalg.norm(matrix, axis=0)
    assert (x >= 0).all()
    assert gradient.max() < 1e-6
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=5, max_size=5))
def test_a_guess_changes_nothing(seed, guess):
    rng = np.random.default_rng(seed)
    matrix, target = rng.uniform(0, 1, (20, 5)), rng.normal(1, 1, 20)
    gram, right = matrix.T @ matrix, matrix.T @ target
    np.testing.assert_allclose(nnls_gram(gram, right, np.array(guess)), nnls_gram(gram, right), atol=1e-9)


def test_nnls_equals_plain_least_squares_where_that_is_positive():
    rng = np.random.default_rng(1)
    matrix, x = rng.uniform(0, 1, (50, 4)), np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(nnls(matrix, matrix @ x), x, rtol=1e-8)


def test_nothing_is_predicted_before_the_first_fit():
    model = StepTimeModel()
    assert not model.fitted
    assert model.predict(Load(4, 0, 4, 100)) == 0.0
    model.observe(Load(4, 0, 4, 100), 0.0)  # a step that took no time says nothing
    assert not model.fitted


def test_residuals_are_what_is_left_of_every_kept_step():
    model = StepTimeModel()
    decode, prompt = Load(4, 0, 4, 400), Load(100, 9900, 1, 100)
    model.observe(decode, 0.01)
    assert model.residuals(decode.stratum).tolist() == []
    for seconds in (0.01, 0.02) * 20:
        model.observe(decode, seconds)
        model.observe(prompt, 0.5)
    model.fit()
    assert model.residuals(prompt.stratum) * model.predict(prompt) == pytest.approx(0.5)
    left = np.sort(model.residuals(decode.stratum) * model.predict(decode))
    assert left == pytest.approx([0.01] * 21 + [0.02] * 20)


def test_true_coefficients_are_recovered_without_noise():
    model = StepTimeModel()
    learn(model, 600, noise=0.0)
    model.fit()
    assert model.saturation == SATURATED_AT
    np.testing.assert_allclose(model.coefficients, TRUE, rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_predictions_are_within_noise_on_other_steps(seed):
    model = StepTimeModel()
    learn(model, 1200, noise=0.03, seed=seed)
    rng = np.random.default_rng(100 + seed)
    loads = [some_load(rng, i % 3) for i in range(300)]
    errors = [abs(model.predict(load) / true_time(load) - 1) for load in loads]
    assert np.mean(errors) < 0.01
    assert model.saturation == SATURATED_AT
    assert model.error == pytest.approx(0.03 * np.sqrt(2 / np.pi), rel=0.35)  # the mean of |noise|


def test_few_steps_take_less_than_at_least():
    model = StepTimeModel()
    assert np.isnan(model.error)
    assert model.at_least(Load(4, 0, 4, 100)) == 0.0
    learn(model, 1200, noise=0.05)
    rng = np.random.default_rng(7)
    loads = [some_load(rng, i % 3) for i in range(600)]
    taken = np.array([true_time(load) * np.exp(0.05 * rng.normal()) for load in loads])
    least = np.array([model.at_least(load) for load in loads])
    assert 0.02 < np.mean(taken < least) < 0.10
    assert (least > 0.85 * taken).mean() > 0.9


def test_a_rare_kind_of_step_is_not_washed_out():
    model = StepTimeModel()
    rng = np.random.default_rng(0)
    for i in range(5000):
        load = some_load(rng, 2 if i % 100 == 0 else 0)
        model.observe(load, true_time(load))
    prompts = [some_load(rng, 2) for _ in range(50)]
    assert max(abs(model.predict(load) / true_time(load) - 1) for load in prompts) < 0.02


def test_the_first_steps_of_a_new_kind_are_learnt_soon():
    """Before any prompt tokens and rows look alike; after a few of them they must not."""
    model = StepTimeModel()
    rng = np.random.default_rng(0)
    for _ in range(3000):
        model.observe(load := some_load(rng, 0), true_time(load))
    for _ in range(40):
        model.observe(load := some_load(rng, 2), true_time(load))
    load = some_load(rng, 2)
    assert model.predict(load) == pytest.approx(true_time(load), rel=0.05)


def test_a_device_that_becomes_slower_is_followed():
    model = StepTimeModel()
    learn(model, 6000, noise=0.01)
    learn(model, 3 * 6 * step_time.MEMORY, noise=0.01, slower=1.5)
    load = Load(100, 60 * 300, 40, 12_000)
    assert model.predict(load) == pytest.approx(1.5 * true_time(load), rel=0.05)


def test_a_hiccup_now_and_then_changes_little():
    model = StepTimeModel()
    rng = np.random.default_rng(0)
    for i in range(1500):
        load = some_load(rng, i % 3)
        model.observe(load, true_time(load) * (10 if i % 100 == 50 else 1))
    load = Load(100, 60 * 300, 40, 12_000)
    assert model.predict(load) == pytest.approx(true_time(load), rel=0.03)


def test_the_margin_covers_the_share_asked_for():
    model = StepTimeModel()
    learn(model, 1500, noise=0.05)
    rng = np.random.default_rng(9)
    margin = model.margin(0.95)
    loads = [some_load(rng, 1 + i % 2) for i in range(2000)]
    within = [true_time(x) * np.exp(0.05 * rng.normal()) <= margin * model.predict(x) for x in loads]
    assert np.mean(within) == pytest.approx(0.95, abs=0.02)


def test_a_later_fit_takes_one_saturation_point_a_step(monkeypatch):
    solved = [0]

    def counting(*args, solve=step_time.nnls_gram):
        solved[0] += 1
        return solve(*args)

    monkeypatch.setattr(step_time, "nnls_gram", counting)
    model = StepTimeModel()
    rng = np.random.default_rng(0)
    per_step = []
    for i in range(2000):
        before, had = solved[0], model.fitted
        model.observe(load := some_load(rng, i % 3), true_time(load))
        if had:
            per_step.append(solved[0] - before)
    assert max(per_step) == 1
    assert sum(per_step) > 5 * 8


def test_the_same_steps_give_the_same_model():
    one, other = StepTimeModel(), StepTimeModel()
    for model in (one, other):
        learn(model, 4 * PER_STRATUM * 3, noise=0.02)
    assert one.coefficients.tolist() == other.coefficients.tolist()
    assert one.saturation == other.saturation
