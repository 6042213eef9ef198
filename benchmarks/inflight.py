"""In-flight batching on devices that take 2 ms and 20 ms a step, whatever they compute.

Boarding (virtual clock): while one request decodes, others arrive at half of a running step; each must be in the next
one, so that its first token comes 1.5 steps after it. Host gap (real clock): the same loop with a device that sleeps on
a thread of its own; the time in which it had nothing to do must be at most 1 % of the step time. Waiting (virtual
clock): Poisson arrivals at half the capacity, steps longer by the host gap that the mode has shown; the mean time to
first token must not exceed that of continuous batching one step deep.
"""

from __future__ import annotations

import operator
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table

from common import Verdict, arguments, console, measured
from headway.core.batch import Batch, StepOutput
from headway.core.config import SchedulerConfig
from headway.core.scheduler import Scheduler
from headway.engine.loop import EngineLoop
from headway.executors.base import Capacity
from headway.executors.simulated import SimulatedExecutor, VirtualClock
from headway.lab import paced, traffic
from headway.lab.drive import Driver
from headway.lab.paced import StepTimes
from headway.lab.traffic import Arrival

STEPS = (0.002, 0.020)
ROWS, TOKENS, LOAD = 32, 16, 0.5
GAP_BAR, BOARDS = 0.01, 1.5
HOLDS = Capacity(num_blocks=4096, block_size=16, max_num_seqs=2 * ROWS, max_model_len=16384)

IN_FLIGHT = SchedulerConfig(batching="inflight", max_batch_size=ROWS, depth=2, prefix_caching=False)
DEPTH_1 = replace(IN_FLIGHT, batching="continuous", depth=1)


@dataclass
class Device:
    """Works through its queue by itself, `step` seconds of real time a step, as a GPU does; tokens are those of a
    simulated one. `gaps`: how long it had nothing to do before each step."""

    step: float
    gaps: list[float] = field(default_factory=list)
    _free_at: float = 0.0

    def __post_init__(self) -> None:
        self._tokens = SimulatedExecutor(HOLDS, lambda batch: self.step, VirtualClock())

    def capacity(self) -> Capacity:
        return HOLDS

    def launch(self, batch: Batch) -> tuple[Any, float]:
        tokens = self._tokens.launch(batch)
        now = time.monotonic()
        self.gaps.append(max(0.0, now - self._free_at))
        self._free_at = max(now, self._free_at) + self.step
        return tokens, self._free_at

    def done(self, ticket: tuple[Any, float]) -> bool:
        return time.monotonic() >= ticket[1]

    def collect(self, ticket: tuple[Any, float]) -> StepOutput:
        tokens, end = ticket
        time.sleep(max(0.0, end - time.monotonic()))
        return self._tokens.collect(tokens)

    def close(self) -> None:
        pass


def boarding(config: SchedulerConfig, step: float) -> float:
    """Steps from arrival to first token, the worst of those who come at half of a running step."""
    long = Arrival(0.0, 1, 1000)
    probes = [Arrival((100 + 7 * i + 0.5) * step, 1, 1) for i in range(100)]
    done = paced.run(config, [long, *probes], step_times=StepTimes(base=step))
    return max(one.ttft for one in done.served[1:]) / step


def mean_ttft(config: SchedulerConfig, step: float, gap: float, count: int, seed: int) -> float:
    """In steps, at half of the capacity."""
    arrivals = traffic.poisson([Arrival(0.0, 1, TOKENS)] * count, LOAD * ROWS / TOKENS / step, seed)
    done = paced.run(config, arrivals, step_times=StepTimes(base=step + gap))
    return statistics.fmean(done.values("ttft")) / step


def host_gaps(config: SchedulerConfig, step: float, seconds: float) -> list[float]:
    """Real time between two steps, in seconds, with 32 rows decoding all the while."""
    executor = Device(step)
    work = [Arrival(0.0, 1, int(seconds / step))] * ROWS

    def rest(until: float) -> None:
        time.sleep(max(0.0, until - time.monotonic()))

    scheduler = Scheduler.of(config, HOLDS.num_blocks, HOLDS.block_size, HOLDS.max_model_len)
    loop = EngineLoop(scheduler, executor, time.monotonic)
    Driver(loop, work, rest).run()
    executor.close()
    return executor.gaps[64:]  # by then the step times are known


def main() -> int:
    """Runs all three at both step times; returns 1 where a bar is missed."""
    parser = arguments(__doc__)
    args = parser.parse_args()
    seconds, count = (5.0, 2000) if args.quick else (20.0, 10_000)
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(5)]
    table = Table(title="in-flight against continuous batching one step deep", title_justify="left")
    for heading in ("step", "boards after", "mean TTFT, steps", "depth 1's", "host gap / step", "depth 1's"):
        table.add_column(heading, justify="right")
    passed, samples, others, gap_shares = True, {}, 0.0, []
    for step in STEPS:
        with console.status(f"{step * 1e3:g} ms steps"), measured() as used:
            gaps, gaps_1 = host_gaps(IN_FLIGHT, step, seconds), host_gaps(DEPTH_1, step, seconds)
        others = max(others, used.others)
        gap, gap_1 = statistics.fmean(gaps), statistics.fmean(gaps_1)
        boards = boarding(IN_FLIGHT, step)
        ours = [mean_ttft(IN_FLIGHT, step, gap, count, seed) for seed in seeds]
        theirs = [mean_ttft(DEPTH_1, step, gap_1, count, seed) for seed in seeds]
        passed &= boards <= BOARDS + 1e-6 and gap <= GAP_BAR * step and all(map(operator.le, ours, theirs))
        gap_shares.append(gap / step)
        table.add_row(
            f"{step * 1e3:g} ms",
            f"{boards:.2f} steps",
            f"{statistics.median(ours):.3f}",
            f"{statistics.median(theirs):.3f}",
            f"{gap / step:.2%}",
            f"{gap_1 / step:.2%}",
        )
        samples[f"{step * 1e3:g} ms"] = {
            "boards": boards,
            "ttft": ours,
            "ttft_depth_1": theirs,
            "gaps": gaps,
            "gaps_depth_1": gaps_1,
        }
    sentence = (
        f"who arrives at half of a step boards the next one; the device waits for the host {gap_shares[0]:.2%} and "
        f"{gap_shares[1]:.2%} of its step times of 2 and 20 ms: {'all bars met' if passed else 'bars MISSED'}."
    )
    notes = ["--quick: one seed, fewer requests and steps"] if args.quick else []
    return Verdict(table, sentence, passed, samples, notes, others).conclude(args)


if __name__ == "__main__":
    sys.exit(main())
