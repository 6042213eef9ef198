"""Charts as inline SVG, drawn by hand: rows of labels at the left, marks at the right, colours from the page's CSS.

Classes of marks: `s0`, `s1` ... colour a series; the page's style sheet defines them for light and dark screens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LABELS, RIGHT = 760, 172, 64
ROW, HEAD, AXIS = 26, 30, 34
Format = Callable[[float], str]
Marks = tuple[tuple[float, float], ...] | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A row of marks; one without `marks` is a heading of those below it.

    For `ranges` each mark is (from, to); for `bars` and `stacked` a length.
    """

    label: str
    marks: Marks = ()


def ranges(rows: Sequence[Row], series: Sequence[str], fmt: Format) -> str:
    """For each row and series a line from a dot (from) to a ring (to), on a logarithmic axis."""
    ends = [end for row in rows for mark in row.marks for end in _pair(mark) if _shows(end)]
    if not ends:
        return ""
    axis = _LogAxis(min(ends), max(ends))
    gap = 14
    tall = max(ROW, gap * len(series) + 10)
    chart = _Chart(rows, tall, [(axis.place(tick), fmt(tick)) for tick in axis.ticks()])
    for row, top in chart.placed:
        for i, mark in enumerate(row.marks):
            start, end = _pair(mark)
            if not _shows(start) or not _shows(end):
                continue
            y = top + tall / 2 + (i - (len(row.marks) - 1) / 2) * gap
            left, right = axis.place(start), axis.place(end)
            tip = escape(f"{row.label}, {series[i]}: P50 {fmt(start)}, P99 {fmt(end)}")
            chart.draw(
                f'<g class="s{i}"><title>{tip}</title>'
                f'<line class="span" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<circle class="dot" cx="{left:.1f}" cy="{y:.1f}" r="4.5"/>'
                f'<circle class="ring" cx="{right:.1f}" cy="{y:.1f}" r="4.5"/></g>'
                f'<text class="value" x="{right + 10:.1f}" y="{y + 4:.1f}">{escape(fmt(end))}</text>'
            )
    return chart.svg(f"{', '.join(series)}: median to 99th percentile")


def bars(rows: Sequence[Row], name: str, fmt: Format) -> str:
    """For each row a bar from zero, its value at its end."""
    most = max((_number(mark) for row in rows for mark in row.marks), default=0.0) or 1.0
    chart = _Chart(rows, ROW, [(_linear(tick, most), fmt(tick)) for tick in _round_ticks(most)])
    for row, top in chart.placed:
        for mark in row.marks:
            value = _number(mark)
            end = _linear(value, most)
            chart.draw(
                f'<g class="s0"><title>{escape(f"{row.label}: {fmt(value)} {name}")}</title>'
                f'<path class="bar" d="{_bar(LABELS, end, top + 5, ROW - 10)}"/></g>'
                f'<text class="value" x="{end + 7:.1f}" y="{top + ROW / 2 + 4:.1f}">{escape(fmt(value))}</text>'
            )
    return chart.svg(name)


def stacked(rows: Sequence[Row], series: Sequence[str]) -> str:
    """For each row shares of one, side by side; the first share's value stands at the right."""
    chart = _Chart(rows, ROW, [(_linear(tick, 1.0), f"{tick:.0%}") for tick in (0, 0.25, 0.5, 0.75, 1.0)])
    for row, top in chart.placed:
        left = float(LABELS)
        for i, mark in enumerate(row.marks):
            share = _number(mark)
            right = left + share * (WIDTH - RIGHT - LABELS)
            tip = escape(f"{row.label}, {series[i]}: {share:.1%}")
            if right - left > 0.5:
                inner = max(left + 0.5, right - 1.5)
                chart.draw(
                    f'<g class="s{i}"><title>{tip}</title>'
                    f'<path class="bar" d="{_bar(left, inner, top + 5, ROW - 10, 2)}"/></g>'
                )
            left = right
        if row.marks:
            first = _number(row.marks[0])
            chart.draw(f'<text class="value" x="{WIDTH - RIGHT + 10}" y="{top + ROW / 2 + 4:.1f}">{first:.0%}</text>')
    return chart.svg(", ".join(series))


def legend(series: Sequence[str], note: str = "") -> str:
    """HTML: what the colours mean."""
    keys = "".join(f'<span class="key"><i class="s{i}"></i>{escape(name)}</span>' for i, name in enumerate(series))
    return f'<p class="legend">{keys}{f"<span>{escape(note)}</span>" if note else ""}</p>'


class _Chart:
    """Labels, grid and axis; what else is drawn comes on top."""

    def __init__(self, rows: Sequence[Row], tall: float, ticks: Sequence[tuple[float, str]]) -> None:
        self.placed: list[tuple[Row, float]] = []
        self._marks: list[str] = []
        y = 0.0
        for row in rows:
            self.placed.append((row, y))
            if row.marks:
                label = f'<text class="label" x="{LABELS - 14}" y="{y + tall / 2 + 4:.1f}">{escape(row.label)}</text>'
            else:
                label = f'<text class="heading" x="0" y="{y + HEAD - 9:.1f}">{escape(row.label)}</text>'
            self._marks.append(label)
            y += tall if row.marks else HEAD
        self._height = y
        self._grid = [
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y:.1f}"/>'
            f'<text class="tick" x="{x:.1f}" y="{y + 18:.1f}">{escape(text)}</text>'
            for x, text in ticks
        ]

    def draw(self, svg: str) -> None:
        self._marks.append(svg)

    def svg(self, title: str) -> str:
        box = f"0 0 {WIDTH} {self._height + AXIS:.0f}"
        inside = "\n".join([*self._grid, *self._marks])
        return f'<svg viewBox="{box}" role="img" aria-label="{escape(title)}">\n{inside}\n</svg>'


class _LogAxis:
    """A logarithmic axis from `low` to `high`, both above zero."""

    def __init__(self, low: float, high: float) -> None:
        self.low = math.log10(low * 0.85)
        self.high = math.log10(max(high, low * 2) * 1.1)

    def place(self, value: float) -> float:
        return LABELS + (math.log10(value) - self.low) / (self.high - self.low) * (WIDTH - RIGHT - LABELS)

    def ticks(self) -> list[float]:
        span = self.high - self.low
        steps = (1, 2, 5) if span < 1.6 else (1, 3) if span < 3.2 else (1,)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        return [tick for tick in ticks if self.low <= math.log10(tick) <= self.high]


def _linear(value: float, most: float) -> float:
    return LABELS + value / most * (WIDTH - RIGHT - LABELS)


def _round_ticks(most: float) -> list[float]:
    """Four or so round numbers from zero to `most`."""
    raw = most / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = min((unit * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda size: abs(size - raw))
    return [i * step for i in range(int(most / step + 1e-9) + 1)]


def _bar(left: float, right: float, top: float, tall: float, radius: float = 3) -> str:
    """A bar with its right end rounded."""
    r = min(radius, max(0.0, right - left))
    return (
        f"M{left:.1f} {top:.1f}H{right - r:.1f}a{r:.1f} {r:.1f} 0 0 1 {r:.1f} {r:.1f}V{top + tall - r:.1f}"
        f"a{r:.1f} {r:.1f} 0 0 1 -{r:.1f} {r:.1f}H{left:.1f}Z"
    )


def _pair(mark: tuple[float, float] | float) -> tuple[float, float]:
    return mark if isinstance(mark, tuple) else (mark, mark)


def _number(mark: tuple[float, float] | float) -> float:
    return mark[1] if isinstance(mark, tuple) else mark


def _shows(value: float) -> bool:
    return math.isfinite(value) and value > 0
