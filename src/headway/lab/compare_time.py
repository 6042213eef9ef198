"""Where the time of a comparison's requests went, arm by arm, and what else it cost: a second table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from rich import box
from rich.table import Table

from headway.core.accounting import LABELS, State
from headway.lab.compare import Outcome

COMPUTED = (State.PREFILL.label, State.DECODE.label)
ORDER = (*(label for label in LABELS if label not in COMPUTED), *COMPUTED)
"""What was waited for, and then what was computed."""
LEAST = 0.01
"""Share of the time below which, in all arms, a state has no column."""
COSTS = ("frag", "gap", "again")
LEGEND = (
    "Of the requests' time from arrival to end: what they waited for, or what was computed. frag: empty room in held "
    "KV blocks. gap: time in which there was work but no step. again: tokens computed again after a preemption."
)


def by_state(outcome: Outcome) -> dict[str, float]:
    """Shares of all requests' time, by state."""
    total: dict[str, float] = {}
    for one in outcome.run.served:
        for state, seconds in one.state_times.items():
            total[state] = total.get(state, 0.0) + seconds
    whole = sum(total.values()) or 1.0
    return {state: seconds / whole for state, seconds in total.items()}


def _cells(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Headings, and a line of cells for each arm."""
    shares = [by_state(outcome) for outcome in outcomes]
    states = [state for state in ORDER if any(share.get(state, 0.0) >= LEAST for share in shares)]
    lines = []
    for outcome, share in zip(outcomes, shares, strict=True):
        run = outcome.run
        costs = [f"{run.kv_fragmentation:.0%}", f"{run.host_gap:.0%}", f"{run.stats.num_recomputed_tokens:,}"]
        lines.append([outcome.arm.title, *(f"{share.get(state, 0.0):.0%}" for state in states), *costs])
    return ["", *(state.removeprefix("wait_") for state in states), *COSTS], lines


def table(outcomes: Sequence[Outcome]) -> Table:
    """For a terminal."""
    headings, lines = _cells(outcomes)
    made = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    for i, heading in enumerate(headings):
        made.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for line in lines:
        made.add_row(*line)
    return made


def html(outcomes: Sequence[Outcome]) -> str:
    """For the page."""
    headings, lines = _cells(outcomes)
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr><th>{escape(title)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for title, *cells in lines
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
