"""The conformance suite: headway's own policies pass, and each broken promise is found."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from headway.cli.main import main
from headway.core import policies
from headway.core.policies import Fcfs, Policy
from headway.lab import conformance


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Less traffic, and no table of 100,000."""
    monkeypatch.setattr(conformance, "_cost", lambda make: "not measured")
    monkeypatch.setattr(conformance, "traffic", partial(_less, conformance.traffic))


def _less(traffic, count, seed):
    return traffic(min(count, 300) if count > 120 else 30, seed)


def verdict(make) -> dict[str, conformance.Check]:
    return {check.name: check for check in conformance.verify(make)}


@pytest.mark.parametrize("name", ["fcfs", "default", "fair", "slo"])
def test_headways_own_keep_their_promises(name):
    assert all(check.passed is not False for check in verdict(partial(policies.make, name, None, 1_000)).values())


class Newest(Policy):
    """Claims what it does not keep."""

    bounded = True

    def score(self, queue, now):
        return -queue.arrival


class WrongType(Fcfs):
    def score(self, queue, now):
        return queue.seq


class WrongShape(Fcfs):
    def score(self, queue, now):
        return np.zeros(1 + len(queue))


class NotFinite(Fcfs):
    def score(self, queue, now):
        return queue.deadline


class Meddler(Fcfs):
    def score(self, queue, now):
        queue._table.priority[queue.index] += 1
        return queue.arrival


class MeddlesLater(Fcfs):
    def served(self, rows, tokens, now):
        rows._table.cached[rows.index] = 5


class Moody(Fcfs):
    calls = 0

    def score(self, queue, now):
        Moody.calls += 1
        return queue.arrival * (-1.0) ** Moody.calls


class Raises(Fcfs):
    def ended(self, rows, now):
        raise KeyError("a tenant")


@pytest.mark.parametrize(
    ("policy", "check", "message"),
    [
        (WrongType, "order", r"score returned int64\[\d+\]; wanted float64"),
        (WrongShape, "order", r"score returned float64\[\d+\]; wanted float64\[\d+\]"),
        (NotFinite, "order", "score returned inf; wanted finite numbers"),
        (Meddler, "order", "score changed the table's column 'priority'"),
        (MeddlesLater, "order", "served changed the table's column 'cached'"),
        (Moody, "order", "gave two answers"),
        (Raises, "order", "KeyError: 'a tenant'"),
    ],
)
def test_a_broken_policy_is_found(policy, check, message):
    found = verdict(policy)[check]
    assert found.passed is False
    assert re.search(message, found.detail), found.detail


def test_a_bound_that_does_not_hold_is_found():
    found = verdict(Newest)["bounded overtaking"]
    assert found.passed is False
    assert "tokens of later work came first" in found.detail


def test_overtaking_is_counted_before_the_first_service():
    """First come, first served lets nobody pass."""
    assert "up to 0 tokens" in verdict(Fcfs)["bounded overtaking"].detail


class TestCommand:
    def test_a_file_of_ones_own(self, tmp_path, capsys):
        path = tmp_path / "mine.py"
        path.write_text(
            "from headway.core.policies import Policy\n\n\nclass Mine(Policy):\n"
            "    bounded = True\n\n    def score(self, queue, now):\n        return -queue.arrival\n"
        )
        assert main(["verify-policy", f"{path}:Mine"]) == 1
        assert "BROKEN" in capsys.readouterr().out
        assert main(["verify-policy", f"aged:{path}:Mine", "--max-overtaking", "500"]) == 0
        assert "BROKEN" not in capsys.readouterr().out

    def test_lists_what_there_is(self, capsys):
        assert main(["verify-policy"]) == 0
        shown = capsys.readouterr().out
        assert all(name in shown for name in policies.POLICIES)

    def test_an_unknown_name_is_a_wrong_call(self, capsys):
        with pytest.raises(SystemExit) as exit:
            main(["verify-policy", "lifo"])
        assert exit.value.code == 2
        assert "unknown policy 'lifo'" in capsys.readouterr().err
