"""What a comparison found, as tables for a terminal, as JSON and as a page with charts (one file, no network)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.lab import charts, compare_time
from headway.lab.charts import Marks, Row
from headway.lab.compare import Figures, Outcome, classes


@dataclass(frozen=True, slots=True)
class Comparison:
    """All arms over the same traffic. `rate` in requests per second; `capacity` that of the in-flight arm, if taken.

    `machine`: facts of `lab.machine`; `model`: its name, or how the steps were paced.
    """

    outcomes: list[Outcome]
    rate: float
    capacity: float | None
    seed: int
    model: str
    machine: dict[str, Any]

    @property
    def workload(self) -> str:
        """In one line."""
        run = self.outcomes[0].run
        load = f", {self.rate / self.capacity:.2f} of capacity" if self.capacity else ""
        mix = ", ".join(f"{len(run.of_class(name).served)} {name or 'requests'}" for name in classes(run))
        return f"{len(run.served):,} requests ({mix}), Poisson arrivals at {self.rate:.3g} per second{load}"


def render(comparison: Comparison) -> RenderableType:
    """One row an arm, and one a class where the order favours one."""
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(HEADINGS[0], no_wrap=True)
    for heading in HEADINGS[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    for _, members in groupby(comparison.outcomes, key=lambda outcome: outcome.arm.group):
        table.add_section()
        for outcome in members:
            table.add_row(outcome.arm.title, *_cells(outcome.figures), *_share_cells(outcome))
            if outcome.arm.by_class:
                for name, figures in outcome.by_class().items():
                    table.add_row(f"    {name}", *_cells(figures), style="dim")
    title = Text(f"{comparison.model}: {comparison.workload}", "bold")
    where = Text("Where the time went", "bold")
    spent = compare_time.table(comparison.outcomes)
    return Group(title, table, where, spent, *(Text(line, "dim") for line in _notes(comparison)))


def _cells(figures: Figures) -> list[str]:
    times = (figures.ttft_p50, figures.ttft_p99, figures.e2e_p50, figures.e2e_p99)
    kept = "-" if figures.attainment is None else f"{figures.attainment:.0%}"
    return [f"{figures.output_throughput:,.1f}", *map(_figure, times), kept]


def _figure(value: float) -> str:
    """Three digits of it."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def _share_cells(outcome: Outcome) -> list[str]:
    run = outcome.run
    return [f"{share:.0%}" for share in (run.stats.batch_efficiency, run.padding_waste, run.utilisation)]


def _notes(comparison: Comparison) -> list[str]:
    count = min(len(outcome.run.served) for outcome in comparison.outcomes)
    lines = [
        "Seconds from arrival. Batch: rows in a step / most rows. Waste: padding and what was computed again.",
        "SLO: the share of promises kept. Used: the share of time in which the device computed wanted tokens.",
        compare_time.LEGEND,
    ]
    if comparison.capacity:
        lines.append(
            f"Capacity: {comparison.capacity:.3g} requests per second, the in-flight arm in a closed loop, rows full."
        )
    if count < 300:
        lines.append(f"{count} requests tell little of a P99: take --requests 300 or more for one that holds.")
    return lines


def seconds(value: float) -> str:
    """A time as a person reads it."""
    if value != value:
        return "-"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def write_json(path: Path, comparison: Comparison, flags: dict[str, Any]) -> None:
    """Machine, flags, figures and every request's times.

    Raises:
        OSError: the file cannot be written.
    """
    document = {
        "machine": comparison.machine,
        "model": comparison.model,
        "flags": flags,
        "seed": comparison.seed,
        "rate": comparison.rate,
        "capacity": comparison.capacity,
        "arms": [outcome.document() for outcome in comparison.outcomes],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_html(path: Path, comparison: Comparison) -> None:
    """The page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(page(comparison), encoding="utf-8")


def page(comparison: Comparison) -> str:
    """A self-contained HTML page."""
    outcomes = comparison.outcomes
    names = classes(outcomes[0].run)
    by_class = {outcome.arm.name: outcome.by_class() for outcome in outcomes}

    def latency(which: str) -> str:
        def mark(outcome: Outcome, name: str) -> tuple[float, float]:
            figures = by_class[outcome.arm.name][name]
            return getattr(figures, f"{which}_p50"), getattr(figures, f"{which}_p99")

        rows = _rows(outcomes, lambda outcome: tuple(mark(outcome, name) for name in names))
        return charts.ranges(rows, names, seconds)

    throughput = charts.bars(
        _rows(outcomes, lambda outcome: (outcome.run.output_throughput,)), "tokens/s", lambda value: f"{value:,.0f}"
    )
    shares = charts.stacked(_rows(outcomes, _shares), ("useful", "wasted", "idle"))
    note = "● median  ○ 99th percentile"
    sections = [
        ("Time to first token", "Lower is better; logarithmic.", charts.legend(names, note) + latency("ttft")),
        ("End to end", "From arrival to the last token; logarithmic.", charts.legend(names, note) + latency("e2e")),
        (
            "Output tokens per second",
            "The load is the same for all: who keeps up with it shows the same figure, who does not shows less.",
            throughput,
        ),
        (
            "What the device did",
            "Useful: wanted tokens. Wasted: padding and what was computed again. Idle: waiting for requests.",
            charts.legend(("useful", "wasted", "idle")) + shares,
        ),
    ]
    body = "\n".join(
        f"<section><h2>{escape(title)}</h2><p>{escape(text)}</p>{chart}</section>" for title, text, chart in sections
    )
    return PAGE.format(
        workload=escape(comparison.workload),
        model=escape(comparison.model),
        cards=_cards(comparison),
        body=body,
        table=_table(comparison),
        spent=compare_time.html(outcomes),
        notes="".join(f"<p>{escape(line)}</p>" for line in [*_notes(comparison), _machine(comparison)]),
        style=STYLE,
    )


def _rows(outcomes: Sequence[Outcome], marks: Callable[[Outcome], Marks]) -> list[Row]:
    rows = []
    for group, members in groupby(outcomes, key=lambda outcome: outcome.arm.group):
        rows.append(Row(group))
        rows += [Row(outcome.arm.title, marks(outcome)) for outcome in members]
    return rows


def _shares(outcome: Outcome) -> tuple[float, ...]:
    run = outcome.run
    return run.utilisation, run.busy - run.utilisation, max(0.0, 1.0 - run.busy)


def _cards(comparison: Comparison) -> str:
    """The first arm against those that gain most over it."""
    outcomes = comparison.outcomes
    first = outcomes[0]
    figures = {outcome.arm.title: outcome.figures for outcome in outcomes}

    def card(what: str, best: Outcome, factor: float) -> str:
        return (
            f'<div class="card"><b>{factor:,.3g}×</b><span>{escape(what)}</span>'
            f"<small>{escape(best.arm.title.removeprefix('+ '))} against {escape(first.arm.title)}</small></div>"
        )

    fastest = max(outcomes, key=lambda outcome: outcome.run.output_throughput)
    soonest = min(outcomes, key=lambda outcome: figures[outcome.arm.title].ttft_p99)
    ending = min(outcomes, key=lambda outcome: figures[outcome.arm.title].e2e_p50)
    base = figures[first.arm.title]
    return (
        card("output tokens per second", fastest, fastest.run.output_throughput / first.run.output_throughput)
        + card("shorter P99 time to first token", soonest, base.ttft_p99 / figures[soonest.arm.title].ttft_p99)
        + card("shorter median end to end", ending, base.e2e_p50 / figures[ending.arm.title].e2e_p50)
    )


HEADINGS = (
    "",
    "output\ntok/s",
    "TTFT\nP50",
    "TTFT\nP99",
    "E2E\nP50",
    "E2E\nP99",
    "SLO\nkept",
    "batch",
    "waste",
    "used",
)


def _table(comparison: Comparison) -> str:
    lines = []
    for group, members in groupby(comparison.outcomes, key=lambda outcome: outcome.arm.group):
        lines.append(f'<tr class="group"><th colspan="{len(HEADINGS)}">{escape(group)}</th></tr>')
        for outcome in members:
            lines.append(_line(outcome.arm.title, [*_cells(outcome.figures), *_share_cells(outcome)]))
            if outcome.arm.by_class:
                lines += [_line(name, _cells(figures), "class") for name, figures in outcome.by_class().items()]
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _line(title: str, cells: list[str], kind: str = "") -> str:
    filled = cells + [""] * (len(HEADINGS) - 1 - len(cells))
    return f'<tr class="{kind}"><th>{escape(title)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in filled)}</tr>'


def _machine(comparison: Comparison) -> str:
    facts = comparison.machine
    gpus = ", ".join(gpu["name"] for gpu in facts.get("gpus", []))
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    devices = f"{facts['processor']}, {facts['cores']} cores" + (f", {gpus}" if gpus else "")
    return f"{devices}; {versions}; seed {comparison.seed}."


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>headway compare</title>
<style>{style}</style>
</head>
<body>
<main>
<header>
<p class="brand">headway compare</p>
<h1>{model}</h1>
<p class="lead">{workload}.</p>
<div class="cards">{cards}</div>
</header>
{body}
<section><h2>All figures</h2><div class="scroll">{table}</div></section>
<section><h2>Where the time went</h2><div class="scroll">{spent}</div></section>
<footer>{notes}</footer>
</main>
</body>
</html>
"""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf7; --card: #ffffff; --ink: #1c2126; --soft: #6b737c; --line: #e4e2dc;
  --s0: #0f766e; --s1: #d97706; --s2: #c9ccd1; --s3: #7c3aed;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --card: #1c2024; --ink: #e8eaec; --soft: #98a1aa; --line: #2d3339;
    --s0: #2dd4bf; --s1: #fbbf24; --s2: #4b535b; --s3: #a78bfa;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 48px 20px 64px; }
.brand { margin: 0; color: var(--s0); font-weight: 600; letter-spacing: .02em; }
h1 { margin: 4px 0 8px; font-size: 32px; line-height: 1.2; letter-spacing: -.01em; }
.lead { margin: 0; color: var(--soft); max-width: 62ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin: 28px 0 8px; }
.card, section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
.card { padding: 16px 20px; display: flex; flex-direction: column; }
.card b { font-size: 34px; line-height: 1.15; letter-spacing: -.02em; font-variant-numeric: tabular-nums; }
.card small { color: var(--soft); font-size: 13px; margin-top: 4px; }
section { margin-top: 20px; padding: 22px 24px 18px; }
h2 { margin: 0; font-size: 19px; }
section > p { margin: 2px 0 14px; color: var(--soft); font-size: 14px; }
section > p.legend { display: flex; flex-wrap: wrap; gap: 6px 18px; margin-bottom: 8px; }
.key { display: inline-flex; align-items: center; gap: 7px; color: var(--ink); }
.key i { width: 11px; height: 11px; border-radius: 3px; background: var(--c); }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
svg { display: block; width: 100%; height: auto; font-size: 12.5px; font-variant-numeric: tabular-nums; }
svg text { fill: var(--ink); }
.label { text-anchor: end; }
.heading { font-weight: 600; fill: var(--soft) !important; font-size: 12px;
  paint-order: stroke; stroke: var(--card); stroke-width: 5px; }
.tick { text-anchor: middle; fill: var(--soft) !important; font-size: 11.5px; }
.value { fill: var(--soft) !important; font-size: 11.5px; }
.grid { stroke: var(--line); }
.bar { fill: var(--c); }
.span { stroke: var(--c); stroke-width: 2.5; opacity: .45; }
.dot { fill: var(--c); }
.ring { fill: var(--card); stroke: var(--c); stroke-width: 2.5; }
.scroll { overflow-x: auto; margin-top: 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 8px; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 500; }
thead th { color: var(--soft); font-weight: 500; border-bottom: 1px solid var(--line); }
tbody tr + tr:not(.class) > * { border-top: 1px solid var(--line); }
tr.class > * { color: var(--soft); padding-top: 0; }
tr.class > th { padding-left: 24px; }
tr.group > th { color: var(--soft); font-size: 12px; font-weight: 600; padding-top: 16px; }
footer { margin-top: 22px; color: var(--soft); font-size: 13px; }
footer p { margin: 4px 0; }
"""
