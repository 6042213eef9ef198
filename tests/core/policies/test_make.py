"""Policies by name, and a user's own from a file."""

from __future__ import annotations

import pytest

from headway.core import policies
from headway.core.policies.aged import Aged

OWN = '''
"""A policy of one's own."""
from headway.core.policies import Policy


class Lifo(Policy):
    """The newest first."""

    def score(self, queue, now):
        return -queue.arrival


class Weighted(Lifo):
    def __init__(self, weight):
        self.weight = weight


class Empty(Policy):
    pass


number = 7
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own_policy.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("name", policies.POLICIES)
def test_every_policy_says_in_its_help_whether_it_is_bounded(name):
    policy = policies.make(name)
    assert policies.summary(name)
    assert policy.bounded is not ("Not bounded" in policies.summary(name))


def test_a_class_from_a_file_or_a_module(own, monkeypatch):
    assert type(policies.make(f"{own}:Lifo")).__name__ == "Lifo"
    monkeypatch.syspath_prepend(str(own.parent))
    assert type(policies.make("own_policy:Lifo")).__name__ == "Lifo"


def test_aged_wraps_any(own):
    policy = policies.make(f"aged:{own}:Lifo", overtaking=77)
    assert isinstance(policy, Aged)
    assert policy.overtaking == 77
    assert type(policy.policy).__name__ == "Lifo"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lifo", "unknown policy 'lifo'; there are: default, fcfs"),
        ("{own}:Fifo", "there is no such name in it"),
        ("{own}:number", "not a subclass of headway.core.policies.Policy"),
        ("{own}:Weighted", "cannot be made without arguments.*weight"),
        ("{own}:Empty", "cannot be made without arguments.*score"),
        ("no_such_module:Lifo", "cannot import no_such_module: ModuleNotFoundError"),
        ("/no/such/file.py:Lifo", "cannot import /no/such/file.py: FileNotFoundError"),
        ("aged:lifo", "unknown policy 'lifo'"),
    ],
)
def test_what_cannot_be_loaded_says_why(own, name, message):
    with pytest.raises(ValueError, match=message):
        policies.make(name.format(own=own))


def test_a_file_that_fails_names_its_error(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("1 / 0")
    with pytest.raises(ValueError, match="ZeroDivisionError"):
        policies.make(f"{path}:Lifo")
