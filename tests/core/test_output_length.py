"""The output-length predictor against distributions that are known: quantiles, survival, censoring, and what pays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.output_length import KNOWN_AFTER, OutputLengthPredictor
from headway.core.request import Request, SamplingParams
from headway.core.table import RequestTable, Rows


class Life:
    """Requests that come, learn and end, one after the other."""

    def __init__(self, seed: int = 0) -> None:
        self.table = RequestTable()
        self.predictor = OutputLengthPredictor()
        self.rng = np.random.default_rng(seed)
        self.handle = 0

    def begin(self, prompt_len: int = 10, allowed: int = 4000, ignore_eos: bool = False, **names: str) -> np.ndarray:
        self.handle += 1
        params = SamplingParams(max_tokens=allowed, ignore_eos=ignore_eos)
        request = Request(str(self.handle), self.handle, [1] * prompt_len, params, 0.0, **names)
        row = self.table.add(request, prompt_len + allowed, 2)
        rows = np.array([row])
        self.predictor.begin(self.table, rows)
        return rows

    def end(self, rows: np.ndarray, length: int, entropy: float | None = None) -> None:
        table, row = self.table, int(rows[0])
        if entropy is not None:
            self.predictor.note_entropy(table, rows, np.array([entropy]))
        allowed = int(table.limit[row] - table.prompt_len[row])
        table.length[row] = table.prompt_len[row] + min(length, allowed)
        self.predictor.finished(table, row, natural=length <= allowed)
        table.free(row)

    def live(self, length: int, entropy: float | None = None, **request) -> None:
        self.end(self.begin(**request), length, entropy)

    def quantiles(self, rows: np.ndarray, *shares: float, generated: int = 0) -> np.ndarray:
        self.table.length[rows] = self.table.prompt_len[rows] + generated
        return self.predictor.quantiles(Rows(self.table, rows, 0.0), shares)[0]


def test_before_anything_is_known_max_tokens_is_expected():
    life = Life()
    for _ in range(KNOWN_AFTER - 1):
        life.live(20)
    rows = life.begin(allowed=300)
    assert life.table.predicted[rows[0]] == 300
    assert life.quantiles(rows, 0.1, 0.9).tolist() == [300, 300]


@pytest.mark.parametrize("seed", range(3))
def test_quantiles_of_a_known_distribution(seed):
    life = Life(seed)
    lengths = np.ceil(life.rng.lognormal(np.log(150), 0.8, 2000)).astype(int)
    for length in lengths:
        life.live(int(length))
    shares = [0.1, 0.25, 0.5, 0.75, 0.9]
    np.testing.assert_allclose(life.quantiles(life.begin(), *shares), np.quantile(lengths, shares), rtol=0.12)


def test_what_has_been_survived_is_a_condition():
    """Of an exponential distribution the rest never becomes shorter; of a fixed length nothing else remains."""
    life = Life()
    lengths = np.ceil(life.rng.exponential(200, 4000)).astype(int)
    for length in lengths:
        life.live(int(length))
    rows = life.begin()
    for generated in (0, 100, 300):
        rest = life.quantiles(rows, 0.5, generated=generated)[0] - generated
        assert rest == pytest.approx(np.median(lengths[lengths > generated] - generated), rel=0.2)
        assert rest == pytest.approx(200 * np.log(2), rel=0.25)


def test_those_that_were_cut_off_are_not_taken_for_short():
    """Half may generate only 50 tokens. Counting only natural ends would halve the median."""
    life = Life()
    lengths = np.ceil(life.rng.exponential(100, 4000)).astype(int)
    for i, length in enumerate(lengths):
        rows = life.begin()
        if i % 2 and length > 50:
            life.table.length[rows] = life.table.prompt_len[rows] + 50
            life.predictor.finished(life.table, int(rows[0]), natural=False)
            life.table.free(int(rows[0]))
        else:
            life.end(rows, int(length))
    median, tail = life.quantiles(life.begin(), 0.5, 0.9)
    assert median == pytest.approx(np.median(lengths), rel=0.12)
    assert tail == pytest.approx(np.quantile(lengths, 0.9), rel=0.15)


@pytest.mark.parametrize("name", ["request_class", "tenant", "prompt_len", "allowed"])
def test_groups_are_told_apart(name):
    kinds = {"prompt_len": (10, 1000), "allowed": (500, 4000)}.get(name, ("one", "two"))
    life = Life()
    for i in range(600):
        life.live(int(life.rng.integers(20, 40)) * (1 + 9 * (i % 2)), **{name: kinds[i % 2]})
    short, long = (life.quantiles(life.begin(**{name: kind}), 0.5)[0] for kind in kinds)
    assert short == pytest.approx(30, rel=0.2)
    assert long == pytest.approx(300, rel=0.2)


def test_an_unknown_tenant_is_expected_to_be_like_all():
    life = Life()
    for i in range(400):
        life.live(100, tenant=f"t{i % 3}")
    assert life.quantiles(life.begin(tenant="new"), 0.5)[0] == pytest.approx(100, rel=0.2)


def test_entropy_is_used_where_it_tells_something():
    life = Life()
    for i in range(800):
        life.live(20 if i % 2 else 400, entropy=0.1 if i % 2 else 2.7)
    assert life.predictor.entropy_pays
    rows = life.begin()
    before = life.quantiles(rows, 0.9)[0]
    life.predictor.note_entropy(life.table, rows, np.array([0.1]))
    assert before > 300
    assert life.quantiles(rows, 0.9)[0] == pytest.approx(20, rel=0.25)


@pytest.mark.parametrize("seed", range(4))
def test_entropy_is_left_out_where_it_tells_nothing(seed):
    life = Life(seed)
    for _ in range(1000):
        life.live(int(np.ceil(life.rng.exponential(100))), entropy=float(life.rng.uniform(0, 3)))
    assert not life.predictor.entropy_pays
    rows = life.begin()
    before = life.quantiles(rows, 0.5, 0.9).tolist()
    life.predictor.note_entropy(life.table, rows, np.array([0.1]))
    assert life.quantiles(rows, 0.5, 0.9).tolist() == before


def test_what_ignores_eos_is_known_and_teaches_nothing():
    life = Life()
    for _ in range(100):
        life.live(20)
    for _ in range(200):
        life.live(500, allowed=500, ignore_eos=True)
    assert life.table.predicted[life.begin(allowed=500, ignore_eos=True)[0]] == 500
    assert life.table.predicted[life.begin(allowed=500)[0]] == pytest.approx(20, abs=4)


def test_a_change_is_followed():
    life = Life()
    for i in range(12_000):
        life.live(50 if i < 6000 else 500)
    assert life.quantiles(life.begin(), 0.5)[0] > 400


def test_a_thousand_tenants_cost_no_more_memory():
    life = Life()
    for i in range(1500):
        life.live(30, tenant=f"t{i}", prompt_len=1 + i % 50)
    assert life.quantiles(life.begin(tenant="t1400"), 0.5)[0] == pytest.approx(30, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(1, 64)), max_size=60),
    st.integers(0, 300),
    st.integers(1, 400),
)
def test_quantiles_rise_and_lie_between_what_is_there_and_what_is_allowed(ends, generated, allowed):
    life = Life()
    for length, most, prompt_len in ends:
        life.live(length, allowed=most, prompt_len=prompt_len)
    generated = min(generated, allowed - 1)
    values = life.quantiles(life.begin(allowed=allowed), 0.01, 0.5, 0.9, 0.999, generated=generated)
    assert (np.diff(values) >= 0).all()
    assert values[0] >= min(generated + 1, allowed)
    assert values[-1] <= allowed
