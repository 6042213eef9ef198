"""The adaptive wait window against every fixed one, on a device that takes 2 ms a step whatever it computes.

Paced: the real engine loop and formation (dynamic, groups of at most 32) on a virtual clock, Poisson arrivals of
requests for one token at 0.1, 0.5 and 0.9 of the capacity (32 in 2 ms). Goodput: requests per second whose end came
within the promise, at three promises: two, three and five steps. Then the rate changes between 0.1 and 0.9: dispatches
until the adaptive window closes as one that has known only the new rate, on the same arrivals.

Bar: at each rate and promise at least 0.95 of the best fixed window's goodput; settled within 50 dispatches.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from rich.table import Table

from common import Verdict, arguments, console
from headway.core.batch import Wait
from headway.core.config import SchedulerConfig
from headway.core.formation import Padded
from headway.core.scheduler import Scheduler
from headway.core.table import Rows
from headway.core.window import AdaptiveWindow
from headway.lab import paced, traffic
from headway.lab.paced import StepTimes

STEP, SIZE = 0.002, 32
CAPACITY = SIZE / STEP
LOADS = (0.1, 0.5, 0.9)
FIXED = (0.0, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02)
PROMISES = (2 * STEP, 3 * STEP, 5 * STEP)
BAR, SETTLED = 0.95, 50


def config(window: str, length: float) -> SchedulerConfig:
    return SchedulerConfig(
        batching="dynamic", wait_window=window, max_wait=length, max_batch_size=SIZE, depth=1, prefix_caching=False
    )


def requests(count: int, load: float, seed: int) -> list[traffic.Arrival]:
    return traffic.poisson([traffic.Arrival(0.0, 1, 1)] * count, load * CAPACITY, seed)


def goodput(arrivals: list[traffic.Arrival], window: str, length: float) -> dict[str, float]:
    """Requests per second within each promise (ms), and the mean size of a group."""
    run = paced.run(config(window, length), arrivals, step_times=StepTimes(base=STEP))
    ends = run.values("e2e")
    within = {f"{promise * 1e3:g}": float((ends <= promise + 1e-9).sum() / run.duration) for promise in PROMISES}
    return within | {"group": run.stats.num_batched_rows / run.stats.num_steps}


class Watched(Padded):
    """A dynamic formation that keeps what its window said, and what one would have said that began at `since`."""

    def __init__(self, length: float, since: float) -> None:
        super().__init__(SIZE, AdaptiveWindow(length))
        self.fresh = AdaptiveWindow(length)
        self.since = since
        self.dispatches = 0
        self.differed_at = 0

    def arrived(self, at: float) -> None:
        super().arrived(at)
        if at >= self.since:
            self.fresh.arrived(at)

    def emptied(self, now: float) -> None:
        super().emptied(now)
        self.fresh.ran(now - self._left)

    def may_join(self, queue: Rows, board: Rows, more: bool, now: float) -> int | Wait:
        answer = super().may_join(queue, board, more, now)
        if more and now >= self.since and not len(board):
            self._compare(queue, answer, now)
        return answer

    def _compare(self, queue: Rows, answer: int | Wait, now: float) -> None:
        if len(queue) < self.size:
            until = answer.until if isinstance(answer, Wait) else now
            ours, other = until - now, max(0.0, self.fresh.closes(queue, self.size, now) - now)
            if abs(ours - other) > 0.1 * STEP:
                self.differed_at = self.dispatches
        if not isinstance(answer, Wait):
            self.dispatches += 1


def settling(before: float, after: float, count: int, seed: int) -> int:
    """The last dispatch after the change of rate at which the window did not close as a fresh one."""
    first = requests(count, before, seed)
    change = first[-1].at
    later = [
        traffic.Arrival(change + one.at, one.prompt, one.output_len) for one in requests(count, after, seed + 1000)
    ]
    formation = Watched(0.02, later[0].at)
    build = _with(formation)
    paced.run(config("adaptive", 0.02), first + later, step_times=StepTimes(base=STEP), build=build)
    return formation.differed_at


def _with(formation: Padded) -> Callable[[SchedulerConfig, int, int, int], Scheduler]:
    def build(config: SchedulerConfig, num_blocks: int, block_size: int, max_model_len: int) -> Scheduler:
        scheduler = Scheduler.of(config, num_blocks, block_size, max_model_len)
        scheduler.strategies.formation = formation
        return scheduler

    return build


def main(args: Namespace) -> int:
    count = 3_000 if args.quick else 10_000
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(5)]
    table = Table(title="goodput, requests/s, best fixed window against the adaptive one (median of the seeds)")
    for name in ("load", "promise ms", "best fixed", "window ms", "group", "adaptive", "group", "ratio"):
        table.add_column(name, justify="right")
    samples: dict[str, Any] = {"goodput": {}, "settled": {}}
    worst = 1e9
    for load in LOADS:
        arms = {f"fixed {length * 1e3:g}": ("fixed", length) for length in FIXED} | {"adaptive": ("adaptive", 0.02)}
        runs = {name: [goodput(requests(count, load, seed), *arm) for seed in seeds] for name, arm in arms.items()}
        samples["goodput"][str(load)] = runs
        middle = {
            name: {key: sorted(run[key] for run in each)[len(each) // 2] for key in each[0]}
            for name, each in runs.items()
        }
        ours = middle.pop("adaptive")
        for promise in (key for key in ours if key != "group"):
            best = max(middle, key=lambda name: middle[name][promise])
            ratio = ours[promise] / middle[best][promise]
            worst = min(worst, ratio)
            row = [load, promise, middle[best][promise], best.split()[1], middle[best]["group"], ours[promise]]
            table.add_row(
                *(f"{x:,.1f}" if isinstance(x, float) else x for x in row), f"{ours['group']:.1f}", f"{ratio:.3f}"
            )
        console.print(f"load {load}: done")
    for before, after in ((0.1, 0.9), (0.9, 0.1)):
        samples["settled"][f"{before} to {after}"] = [settling(before, after, count // 2, seed) for seed in seeds]
    settled = max(max(each) for each in samples["settled"].values())
    sentence = (
        f"The adaptive window has at least {worst:.3f} of the best fixed window's goodput and settles in {settled} "
        f"dispatches after a change of rate (bars {BAR} and {SETTLED})."
    )
    notes = [f"--quick: {count:,} requests an arm and one seed instead of 10,000 and five"] if args.quick else []
    return Verdict(table, sentence, worst >= BAR and settled <= SETTLED, samples, notes).conclude(args)


if __name__ == "__main__":
    sys.exit(main(arguments(__doc__).parse_args()))
