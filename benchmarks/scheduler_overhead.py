"""What a step costs the host: schedule, commit and the events in wire form, for every policy.

All rows decode, and each gets a new block every 16 tokens, not all in the same step. "steady": the batch is full and
stays so. "one joins": before a step one row is aborted, and the best of the queue takes its place; for a queue of
0, 1,000 and 100,000. The policies are timed in turn, in five rounds. No model, no executor: outputs are made
beforehand. Times are of whole steps, in microseconds, medians.

With --vllm PYTHON, an interpreter that has vLLM, its scheduler is timed over the same rows in turn with this one.

Bars: steady 60, 90, 220 and 600 us at 64, 256, 1,024 and 4,096 rows; 100,000 waiting add 2 ms at most to a step in
which one joins; 1/40 of vLLM's from 256 rows up.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, measured
from headway.core.batch import Batch, StepEvents, StepOutput
from headway.core.config import SchedulerConfig
from headway.core.policies import POLICIES
from headway.core.request import Request, SamplingParams, Slo
from headway.core.scheduler import Scheduler
from headway.engine.messages import encoder, to_step

BARS = {64: 60.0, 256: 90.0, 1024: 220.0, 4096: 600.0}
"""Microseconds of a steady step, by rows."""
QUEUES = (0, 1000, 100_000)
QUEUE_BAR = 2000.0
"""Microseconds that the longest queue may add."""
VLLM_SHARE = 1 / 40
ROUNDS = 5
PROMPT = 16
BLOCK_SIZE = 16
STEP_SECONDS = 0.03
VLLM_SCRIPT = Path(__file__).with_name("vllm_scheduler.py")


@dataclass
class Bench:
    """A scheduler with `rows` requests on board that decode, and its clock."""

    rows: int
    steps: int

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            policy="fcfs",
            max_batch_size=self.rows,
            max_num_seqs=self.rows,
            max_num_batched_tokens=2 * self.rows + 512,
            depth=1,
        )
        longest = 16_384
        self.scheduler = Scheduler.of(config, self.rows * longest // BLOCK_SIZE, BLOCK_SIZE, longest)
        self.now = 0.0
        self._added = 0
        self.add(self.rows)
        while len(self.scheduler.running) < self.rows or self.prefilling:
            self.step()

    @property
    def prefilling(self) -> bool:
        table, rows = self.scheduler.table, self.scheduler.running.rows
        return bool((table.length[rows] == table.prompt_len[rows]).any())

    def add(self, count: int) -> None:
        """So many more requests, of several classes, tenants, priorities and lengths, half of them with a deadline."""
        for _ in range(count):
            number = self._added
            self._added += 1
            self.scheduler.add(
                Request(
                    id=f"r{number}",
                    handle=number,
                    prompt_token_ids=np.full(PROMPT + number % 7, number % 30_000, np.int32),
                    params=SamplingParams(max_tokens=16_000, temperature=0.0, ignore_eos=True),
                    arrival=self.now + number * 1e-9,
                    priority=number % 3,
                    tenant=f"t{number % 8}",
                    request_class=("realtime", "batch")[number % 2],
                    slo=Slo(deadline=3600.0) if number % 4 < 2 else Slo(),
                ),
                self.now,
            )

    def fill(self, waiting: int) -> None:
        """So many requests in the queue."""
        self.add(waiting - len(self.scheduler.waiting))

    def step(self) -> float:
        """Seconds of one step."""
        self.now += STEP_SECONDS
        began = perf_counter()
        batch = self.scheduler.schedule(self.now)
        scheduled = perf_counter()
        assert isinstance(batch, Batch)
        samples = batch.samples.astype(np.int32)
        output = StepOutput(batch.step_id, samples, np.full(int(samples.sum()), 7, np.int32), elapsed=STEP_SECONDS)
        again = perf_counter()
        events = self.scheduler.commit(batch, output, self.now)
        encoder.encode(to_step(events))
        return scheduled - began + perf_counter() - again

    def steady(self, policy: str) -> list[float]:
        """Microseconds of steps in which nobody comes or goes."""
        self.follow(policy)
        return [self.step() * 1e6 for _ in range(self.steps)]

    def joining(self, policy: str) -> list[float]:
        """Microseconds of steps in which one joins in the place of one that has left."""
        self.follow(policy)
        times = []
        for _ in range(self.steps // 8):
            self.leave()
            times.append(self.step() * 1e6)
            self.step()
        return times

    def leave(self) -> None:
        """A row ends, and another request joins the queue."""
        scheduler = self.scheduler
        rows = scheduler.running.rows
        ended = scheduler.abort(int(scheduler.table.handle[rows[0]]), self.now)
        assert isinstance(ended, StepEvents)
        self.add(1)

    def follow(self, policy: str) -> None:
        self.scheduler.follow(replace(self.scheduler.config, policy=policy), self.now)
        for _ in range(8):
            self.step()


def in_turn(times: Callable[[str], list[float]]) -> dict[str, list[float]]:
    """Every policy's times, taken in ROUNDS, so that no disturbance meets one policy alone."""
    taken: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _ in range(ROUNDS):
        for policy, of in taken.items():
            of += times(policy)
    return taken


def vllm(python: Path, rows: int, steps: int) -> list[float]:
    """Microseconds of vLLM's schedule and update_from_output over as many decoding rows."""
    command = [str(python), "-P", str(VLLM_SCRIPT), str(rows), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM's scheduler could not be timed:\n{done.stderr[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main(args: Namespace) -> int:
    """Times everything; returns 1 where a bar is missed."""
    steps = 100 if args.quick else 500
    queues = QUEUES[:2] if args.quick else QUEUES
    table = Table(title="microseconds of the host per step, median; the dearest policy by name", title_justify="left")
    for heading in (
        "rows",
        "bar",
        "steady: fcfs",
        "dearest",
        *(f"one joins, {q:,} wait" for q in queues),
        "vLLM",
        "share",
    ):
        table.add_column(heading, justify="right")
    passed, samples, worst, added = True, {}, 0.0, 0.0
    with measured() as used:
        for rows, bar in BARS.items():
            console.print(f"{rows} rows ...")
            bench = Bench(rows, steps // ROUNDS)
            steady = in_turn(bench.steady)
            joins: dict[int, dict[str, list[float]]] = {}
            for queue in queues:
                bench.fill(queue)
                joins[queue] = in_turn(bench.joining)
            theirs = vllm(args.vllm, rows, steps // 4) if args.vllm else None
            name, cost = dearest(steady)
            idle, busy = (
                {policy: statistics.median(times) for policy, times in joins[queue].items()}
                for queue in (queues[0], queues[-1])
            )
            adds = max(busy[policy] - idle[policy] for policy in POLICIES)
            share = cost / statistics.median(theirs) if theirs else None
            passed &= cost <= bar and adds <= QUEUE_BAR and (share is None or rows < 256 or share <= VLLM_SHARE)
            worst, added = max(worst, cost / bar), max(added, adds)
            table.add_row(
                f"{rows:,}",
                f"{bar:g}",
                f"{statistics.median(steady['fcfs']):.0f}",
                f"{cost:.0f} {name}",
                *("{1:,.0f} {0}".format(*dearest(joins[queue])) for queue in queues),
                f"{statistics.median(theirs):,.0f}" if theirs else "-",
                f"1/{1 / share:.0f}" if share else "-",
            )
            samples[str(rows)] = {"steady": steady, "joins": joins, "vllm": theirs}
    notes = ["schedule + commit + encoding of the events; the outputs themselves and the executor are left out"]
    if args.quick:
        notes.append("--quick: 100 steps each, no queue of 100,000")
    if not args.vllm:
        notes.append("vLLM was not timed: --vllm PYTHON names an interpreter that has it")
    sentence = (
        f"The dearest policy takes {worst:.2f} of its bar; {queues[-1]:,} waiting add {added / 1000:.2f} ms to a step "
        f"in which one joins (bar 2): {'met' if passed else 'MISSED'}."
    )
    return Verdict(table, sentence, passed, samples, notes, used.others).conclude(args)


def dearest(times: dict[str, list[float]]) -> tuple[str, float]:
    """The policy with the highest median, and that."""
    medians = {policy: statistics.median(values) for policy, values in times.items()}
    name = max(medians, key=medians.__getitem__)
    return name, medians[name]


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="an interpreter that can import vllm")
    sys.exit(main(parser.parse_args()))
