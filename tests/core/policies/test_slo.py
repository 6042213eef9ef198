"""The order by promise: who can still be kept goes before who cannot, the easiest to keep first."""

from __future__ import annotations

import math

import pytest

from headway.core import policies
from headway.core.load import Load
from headway.core.request import Slo
from headway.core.step_time import StepTimeModel
from tests.core.policies.queue import Queue


def device() -> StepTimeModel:
    """1 ms a token and 10 ms a step; a step has about 32 rows."""
    model = StepTimeModel()
    for tokens in (32, 64, 128, 256) * 20:
        model.observe(Load(tokens, 0.0, 32, 3200.0), 0.01 + 0.001 * tokens)
    return model


def queue(name: str = "slo") -> Queue:
    model = device()
    line = Queue(policies.Relegating(policies.make(name, model), model))
    line.table.lengths_known = True
    return line


def test_the_cheaper_of_two_with_the_same_promise_goes_first():
    line = queue()
    long = line.add(prompt_len=400, deadline=60.0)
    short = line.add(prompt_len=20, deadline=60.0)
    assert line.order() == [short, long]


def test_of_two_that_cost_the_same_the_one_with_more_time_is_the_easier_to_keep():
    line = queue()
    hasty = line.add(deadline=5.0)
    patient = line.add(deadline=50.0)
    nothing = line.add()
    assert line.order() == [nothing, patient, hasty]


def test_four_times_the_time_makes_up_for_twice_the_cost():
    line = queue()
    costly = line.add(prompt_len=300, max_tokens=1, deadline=44.0)
    cheap = line.add(prompt_len=150, max_tokens=1, deadline=10.0)
    cheaper = line.add(prompt_len=130, max_tokens=1, deadline=10.0)
    assert line.order() == [cheaper, costly, cheap]


def test_who_can_no_longer_be_kept_goes_last():
    line = queue()
    late = line.add(deadline=2.0)
    line.now = 3.0
    long = line.add(prompt_len=800, max_tokens=400, deadline=60.0)
    assert line.order() == [long, late]


def test_hopeless_is_who_cannot_end_in_time_even_now():
    """400 tokens of prompt take 0.4 s and 100 of answer more than 3: it is given up before its deadline is past."""
    line = queue()
    long = line.add(prompt_len=400, max_tokens=100, deadline=100.0)
    other = line.add(prompt_len=900, max_tokens=100, deadline=1e4)
    assert line.order() == [long, other]
    line.now = 96.5
    assert line.order() == [other, long]


def test_a_first_token_that_came_late_is_a_promise_broken():
    line = queue()
    handle = line.add(slo=Slo(ttft=1.0))
    other = line.add(prompt_len=500)
    row = line.table.row_of(handle)
    line.table.first_token[row] = 0.5
    line.now = 2.0
    assert line.order() == [handle, other]
    line.table.first_token[row] = 1.5
    assert line.order() == [other, handle]


@pytest.mark.parametrize("name", ["slo", "aged:slo"])
def test_who_promised_nothing_is_never_given_up(name):
    line = queue(name)
    old = line.add(prompt_len=10)
    line.now = 1e6
    new = line.add(prompt_len=500, deadline=60.0)
    assert line.order() == [old, new]


def test_any_policy_can_relegate():
    line = Queue(policies.Relegating(policies.make("fcfs"), device()))
    late = line.add(slo=Slo(ttft=1.0))
    line.now = 2.0
    first = line.add(slo=Slo(ttft=math.inf))
    line.now = 2.5
    second = line.add(slo=Slo(ttft=30.0))
    assert line.order() == [first, second, late]


def test_an_answer_whose_length_nobody_knows_is_not_given_up_for_it():
    line = queue()
    line.table.lengths_known = False
    perhaps = line.add(prompt_len=400, max_tokens=10_000, deadline=20.0)
    other = line.add(prompt_len=390, max_tokens=20_000, deadline=1e4)
    line.table.length_group[:] = 0  # as of all that do not ignore EOS
    line.now = 5.0
    assert line.order() == [perhaps, other]
    line.table.lengths_known = True
    assert line.order() == [other, perhaps]
