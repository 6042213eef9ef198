"""Figures against closed forms, and JSON from which they can be computed again."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headway.lab.load import Result
from headway.lab.report import Spread, percentile, render, summarise, write_json


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float):
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-9, abs=1e-6)


def test_no_values_have_no_percentile():
    assert Spread.of([]) is None
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def regular(start: float, first: float, gap: float, tokens: int, wanted: int | None = None) -> Result:
    """A request due at `start` whose tokens come one by one at a steady pace."""
    chunks = [start + first + gap * index for index in range(tokens)]
    return Result(
        wanted=wanted or tokens,
        due=start,
        sent=start + 0.25,
        chunks=chunks,
        end=chunks[-1],
        prompt_tokens=100,
        output_tokens=tokens,
        finish_reason="length",
    )


def failure(start: float, end: float) -> Result:
    return Result(wanted=10, due=start, sent=start, end=end, error="503 not ready")


def test_a_summary_has_the_closed_forms():
    results = [regular(0.0, 1.0, 0.5, 11), regular(2.0, 3.0, 0.5, 5, wanted=9), failure(0.0, 8.0)]
    summary = summarise(results)
    assert (summary.requests, summary.failed, summary.short) == (3, 1, 1)
    assert summary.duration == 8.0  # the failure was the last to end
    assert (summary.prompt_tokens, summary.output_tokens) == (200, 16)
    assert summary.request_throughput == 2 / 8
    assert summary.output_throughput == 16 / 8
    assert summary.total_throughput == 216 / 8
    assert summary.ttft == Spread(2.0, 2.0, pytest.approx(2.8), pytest.approx(2.98))
    assert summary.tpot == Spread(0.5, 0.5, 0.5, 0.5)
    assert summary.itl == Spread(0.5, 0.5, 0.5, 0.5)
    assert summary.e2e.mean == ((1.0 + 10 * 0.5) + (3.0 + 4 * 0.5)) / 2
    assert summary.errors == {"503 not ready": 1}


def test_tpot_is_per_token_where_chunks_hold_several():
    result = regular(0.0, 1.0, 0.5, 3)
    result.output_tokens = 5
    assert result.tpot == 1.0 / 4
    assert result.itl == [0.5, 0.5]


def test_one_token_has_no_tpot():
    assert regular(0.0, 1.0, 0.5, 1).tpot is None
    assert summarise([regular(0.0, 1.0, 0.5, 1)]).tpot is None


def shown(results: list[Result]) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(render(summarise(results), "a run"))
    return console.file.getvalue()


def test_the_table_shows_failures_and_short_answers():
    text = shown([regular(0.0, 1.0, 0.5, 11), regular(0.0, 1.0, 0.5, 5, wanted=9), failure(0.0, 1.0)])
    assert re.search(r"3 +│ +1 +│ +1 +│", text)  # requests, failed, short
    assert "1 short" in text
    assert "1 failed: 503 not ready" in text
    assert "1,000.0" in text  # TTFT in milliseconds
    assert "0.25 s (P99) late" in text


def test_a_run_without_an_answer_still_has_a_table():
    text = shown([failure(0.0, 1.0)])
    assert "1 failed: 503 not ready" in text


def test_figures_can_be_computed_again_from_the_json(tmp_path: Path):
    results = [regular(0.0, 1.0, 0.5, 11), regular(2.0, 3.0, 0.25, 5, wanted=9), failure(0.0, 2.0)]
    summary = summarise(results)
    path = tmp_path / "run.json"
    write_json(path, summary, results, machine={"cores": 2}, flags={"seed": 0})
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["machine"] == {"cores": 2}
    assert document["flags"] == {"seed": 0}
    again = summarise([Result(**sample) for sample in document["samples"]])
    assert again == summary
    assert document["summary"]["ttft"]["p99"] == summary.ttft.p99
    assert document["summary"]["output_throughput"] == summary.output_throughput
