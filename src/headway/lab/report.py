"""What a load test found: figures, a table to read, and JSON from which every figure can be computed again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.lab.load import Result

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile, interpolated linearly between the two nearest values; `values` need not be sorted.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values, so no percentile")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of one measure, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        return cls(sum(values) / len(values), *(percentile(values, percent) for percent in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run. Latencies are of the requests that were answered; throughput counts only these.

    `duration` is the seconds from the start to the last answer or failure. `lateness` is how long after its due
    time a request left this client: large where a slot had to come free, or where the client is too slow.
    """

    requests: int
    failed: int
    short: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    counted_by_chunks: int
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    lateness: Spread | None
    errors: dict[str, int]

    @property
    def request_throughput(self) -> float:
        """Answered requests per second."""
        return (self.requests - self.failed) / self.duration if self.duration else 0.0

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.duration if self.duration else 0.0

    @property
    def total_throughput(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.duration if self.duration else 0.0


def summarise(results: Sequence[Result]) -> Summary:
    """The figures of `results`, all of them: a failure is counted where it has no latency to show."""
    answered = [result for result in results if result.ok]
    return Summary(
        requests=len(results),
        failed=len(results) - len(answered),
        short=sum(result.short for result in answered),
        duration=max((result.end for result in results if result.end is not None), default=0.0),
        prompt_tokens=sum(result.prompt_tokens or 0 for result in answered),
        output_tokens=sum(result.output_tokens for result in answered),
        counted_by_chunks=sum(result.counted for result in answered),
        ttft=Spread.of([result.ttft for result in answered if result.ttft is not None]),
        tpot=Spread.of([result.tpot for result in answered if result.tpot is not None]),
        itl=Spread.of([gap for result in answered for gap in result.itl]),
        e2e=Spread.of([result.e2e for result in answered if result.e2e is not None]),
        lateness=Spread.of([result.sent - result.due for result in results]),
        errors=dict(Counter(result.error for result in results if result.error is not None).most_common()),
    )


def render(summary: Summary, title: str) -> RenderableType:
    """The summary as tables for a terminal, with what went wrong below them."""
    counts = _table("requests", "failed", "short", "seconds", "requests/s", "output tokens/s", "all tokens/s")
    counts.add_row(
        f"{summary.requests:,}",
        f"{summary.failed:,}",
        f"{summary.short:,}",
        f"{summary.duration:,.1f}",
        f"{summary.request_throughput:,.2f}",
        f"{summary.output_throughput:,.1f}",
        f"{summary.total_throughput:,.1f}",
    )
    latencies = _table("milliseconds", "mean", *(f"P{percent}" for percent in PERCENTILES))
    for name in ("ttft", "tpot", "itl", "e2e"):
        spread: Spread | None = getattr(summary, name)
        values = astuple(spread) if spread else ()
        latencies.add_row(name.upper(), *(f"{value * 1000:,.1f}" for value in values))
    return Group(Text(title, "bold"), counts, latencies, *map(Text, _remarks(summary)))


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _remarks(summary: Summary) -> list[str]:
    lines = [f"{summary.prompt_tokens:,} prompt tokens, {summary.output_tokens:,} output tokens"]
    if summary.short:
        lines.append(f"{summary.short} short: their answers ended before the wanted number of tokens")
    if summary.counted_by_chunks:
        lines.append(f"{summary.counted_by_chunks} answers came without usage: their chunks were counted as tokens")
    if summary.lateness and summary.lateness.p99 > 0.1:
        lines.append(f"requests left this client up to {summary.lateness.p99:.2f} s (P99) late; that time is counted")
    lines += [f"{count} failed: {error}" for error, count in summary.errors.items()]
    return lines


def write_json(path: Path, summary: Summary, results: Sequence[Result], **context: Any) -> None:
    """Write `context` (machine, versions, flags, seeds), the figures and every request's raw times.

    Raises:
        OSError: the file cannot be written.
    """
    throughput = {
        "request_throughput": summary.request_throughput,
        "output_throughput": summary.output_throughput,
        "total_throughput": summary.total_throughput,
    }
    document = {**context, "summary": asdict(summary) | throughput, "samples": [asdict(result) for result in results]}
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
