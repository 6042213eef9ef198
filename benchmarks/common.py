"""What all benchmarks share: their flags, medians, the check that the machine was quiet, the JSON, the verdict."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from headway.lab import machine

sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
"""kernels.py beside this is a benchmark, and not the package that transformers looks for."""

console = Console(highlight=False, soft_wrap=True)

QUIET = 0.05
"""Cores that other processes may use while something is measured."""


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the flags that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within 90 s; says what it leaves out")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, flags and raw samples")
    return parser


def spread(values: Sequence[float], digits: int = 1) -> str:
    """The median with the least and the largest value."""
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{median:,.{digits}f} ({low:,.{digits}f}-{high:,.{digits}f})"


@dataclass(slots=True)
class Measured:
    """How long something took, in seconds, and how many cores other processes used meanwhile."""

    seconds: float = 0.0
    others: float = 0.0


@contextmanager
def measured() -> Iterator[Measured]:
    """Time the block and watch who else computes. The figures are there when the block has ended."""
    result = Measured()
    busy, own, start = _busy(), _own(), perf_counter()
    yield result
    result.seconds = perf_counter() - start
    result.others = max(0.0, (_busy() - busy) - (_own() - own)) / result.seconds


def _busy() -> float:
    """Seconds for which the machine's cores have computed, for anyone."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest - times.guest_nice


def _own() -> float:
    """Seconds for which this process and its children have computed."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@dataclass(slots=True)
class Verdict:
    """The end of a benchmark: prints the table and, last, the sentence; writes the JSON; gives the exit status."""

    table: Table
    sentence: str
    passed: bool
    samples: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    others: float = 0.0

    def conclude(self, args: argparse.Namespace) -> int:
        """Print and write everything. Returns 0, or 1 where the bar was missed."""
        console.print(self.table)
        if self.others > QUIET:
            self.notes.append(f"not a quiet machine: other processes used up to {self.others:.2f} cores")
        for note in self.notes:
            console.print(f"note: {note}")
        if args.json:
            document = {
                "machine": machine.facts(),
                "flags": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
                "samples": self.samples,
                "others_cores": self.others,
                "notes": self.notes,
                "sentence": self.sentence,
                "passed": self.passed,
            }
            args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(self.sentence)
        return 0 if self.passed else 1
