"""headway compare: every arm over the same traffic, live or paced, and what is made of it."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from headway.cli.main import main
from headway.core.config import SchedulerConfig
from headway.core.policies import POLICIES
from headway.engine.config import EngineConfig
from headway.lab import machine, traffic
from headway.lab.compare import Live, Paced, arms, compare
from headway.lab.compare_report import Comparison, page, render, write_json
from headway.lab.drive import nobody


@pytest.fixture(scope="module")
def comparison():
    requests = traffic.poisson(traffic.chat_and_documents(60, seed=0, scale=0.3), 3.0, seed=0)
    chosen = [arm for arm in arms() if arm.group.startswith("Ways") or arm.name in ("priority", "classes", "srpt")]
    outcomes = compare(Paced(), chosen, requests, lambda arm: nobody)
    return Comparison(outcomes, 3.0, 4.0, 0, "Paced", machine.facts())


def test_the_arms_are_the_ladder_and_then_every_policy():
    names = [arm.name for arm in arms()]
    assert names[:6] == ["static", "dynamic", "continuous", "chunked", "inflight", "priority"]
    assert set(names[5:]) == set(POLICIES) - {"fcfs"}
    ladder = [arm.config for arm in arms()[2:6]]
    assert [one.chunked_prefill for one in ladder] == [False, True, True, True]
    assert [one.batching for one in ladder] == ["continuous", "continuous", "inflight", "inflight"]
    assert [one.policy for one in ladder] == ["fcfs", "fcfs", "fcfs", "priority"]


def test_all_arms_serve_the_same(comparison):
    wanted = {outcome.run.output_tokens for outcome in comparison.outcomes}
    assert len(wanted) == 1
    by_name = {outcome.arm.name: outcome for outcome in comparison.outcomes}
    assert by_name["static"].run.padding_waste > 0.1 > by_name["continuous"].run.padding_waste
    assert by_name["priority"].by_class().keys() == {"realtime", "batch"}


def test_the_table_has_a_row_an_arm_and_a_class(comparison):
    console = Console(width=80, file=StringIO())
    console.print(render(comparison))
    text = console.file.getvalue()
    figures, _, times = text.partition("Where the time went")
    lines = figures.splitlines()
    for outcome in comparison.outcomes:
        (line,) = [line for line in lines if line.strip().startswith(f"{outcome.arm.title}  ")]
        assert f"{outcome.run.output_throughput:,.1f}" in line
    assert sum(line.strip().startswith("realtime") for line in lines) == 3
    assert "…" not in text
    for outcome in comparison.outcomes:
        (line,) = [line for line in times.splitlines() if line.strip().startswith(f"{outcome.arm.title}  ")]
        *shares, _, _, again = line.removeprefix(f" {outcome.arm.title}").split()
        assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100, abs=5)
        assert again == f"{outcome.run.stats.num_recomputed_tokens:,}"


def test_json_holds_samples_from_which_the_figures_follow(comparison, tmp_path):
    write_json(tmp_path / "c.json", comparison, {"seed": 0})
    document = json.loads((tmp_path / "c.json").read_text())
    assert len(document["arms"]) == len(comparison.outcomes)
    for arm in document["arms"]:
        samples = arm["samples"]
        ttft = [one["first_token"] - one["arrival"] for one in samples]
        assert np.percentile(ttft, 99) == pytest.approx(arm["figures"]["ttft_p99"], abs=1e-4)
        tokens = sum(one["output_len"] for one in samples)
        last = max(one["finished"] for one in samples)
        assert tokens / last == pytest.approx(arm["figures"]["output_throughput"], rel=1e-4)


class Page(HTMLParser):
    """Checks that tags close in order, and keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.charts = 0

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.charts += tag == "svg"
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page needs the network"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        self.text += data


def test_the_page_stands_alone(comparison):
    html = page(replace(comparison, model="a <model> & more"))
    read = Page()
    read.feed(html)
    assert read.open == []
    assert read.charts == 4
    assert "a <model> & more" in read.text
    for unwanted in (">nan", '"nan', "url(", "@import"):
        assert unwanted not in html
    for outcome in comparison.outcomes:
        assert read.text.count(outcome.arm.title) >= 5


def test_the_real_model_runs_the_same_arms(tiny_model_dir):
    limits = SchedulerConfig(max_batch_size=64)
    config = EngineConfig(
        model=str(tiny_model_dir), dtype="float32", threads=1, kv_cache_memory=2**24, scheduler=limits
    )
    live = Live(config, str(tiny_model_dir))
    requests = traffic.poisson(traffic.chat_and_documents(20, seed=0, scale=0.1), 100.0, seed=0)
    requests = traffic.with_tokens(requests, seed=0)
    chosen = [arm for arm in arms() if arm.name in ("static", "inflight")]
    outcomes = compare(live, chosen, requests, lambda arm: nobody)
    live.close()
    for outcome in outcomes:
        assert [one.output_len for one in outcome.run.served] == [one.output_len for one in requests]
        assert 0 < outcome.run.busy <= 1
        assert all(one.arrival == pytest.approx(one.request.at) for one in outcome.run.served)
    assert len(live.step_times) == 2


def test_the_command(tmp_path, capsys):
    html, numbers = tmp_path / "c.html", tmp_path / "c.json"
    flags = ["--paced", "--requests", "30", "--only", "static", "inflight", "--html", str(html), "--json", str(numbers)]
    assert main(["compare", *flags]) == 0
    assert "In-flight" in capsys.readouterr().out
    assert html.read_text().startswith("<!doctype html>")
    assert [arm["name"] for arm in json.loads(numbers.read_text())["arms"]] == ["static", "inflight"]


def test_an_arm_that_does_not_exist_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--paced", "--only", "quantum"])
    assert "quantum" in capsys.readouterr().err
