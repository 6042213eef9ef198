"""Promises under pressure: the order by promise, with and without refusals, against other orders.

Paced: the real scheduler and loop on a virtual clock, with step times of the embedded model. All arms have the same
engine: continuous batching and the latency budget, which keeps each request's own TPOT for all orders alike, so that
nothing but who goes first, or is refused, makes a difference.

Part one: a mix of four classes. Chat wants its first token within 8 s and 0.5 s per token; agents want short answers
as a whole within 40 s; documents a first token within 40 s and 0.6 s per token; batch requests, whose answers are long,
all within 240 s. Poisson arrivals at loads of what first come, first served finishes in a closed loop with its rows
full, and then drained. A promise is kept if all of it is; a refused request is a miss. Goodput is promises kept per
second of arrivals. Quartiles are of prompt and answer together.

Part two: what a refused client is told. 300 s at load 1.5, then 0.7. The truth of a refusal is found by running the
same traffic once more with that one request admitted: scheduler and clock are deterministic, so up to its arrival
everything is as it was, and from there on the only difference is that it waits until it is served. Looked at are
refusals from 20 s before the step down until the end, since their waits pass at 0.7.

Bars, for both arms by promise: at no load less than 0.9 times the goodput that there was at a lower one; at 1.5, at
least 1.5 times FCFS's; no quartile's attainment below half of the mean. The median ratio of predicted to true wait of
refusals within a factor of 2.
"""

from __future__ import annotations

import math
import random
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean, median

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, spread
from headway.core.config import SchedulerConfig
from headway.core.request import Request, Slo
from headway.core.scheduler import Scheduler
from headway.lab import paced
from headway.lab.drive import Run
from headway.lab.traffic import Arrival, poisson

LOADS = (0.8, 1.0, 1.5)
COUNT, QUICK_COUNT = 1_200, 400
"""Requests of a seed, for each arm and load."""
SEEDS, QUICK_SEEDS = 5, 2
PROBES, QUICK_PROBES = 16, 6
"""Refusals of a seed whose truth is looked for."""
BEFORE, AFTER, LOW = 300.0, 300.0, 0.7
ENGINE = SchedulerConfig(
    batching="continuous",
    budget="latency",
    tpot_slo=2.0,
    max_batch_size=32,
    max_num_batched_tokens=256,
    prefix_caching=False,
)
OURS = {"slo, refusing": ("slo", "refuse"), "slo, relegating": ("slo", "relegate")}
OTHERS = {name: (name, "accept") for name in ("fcfs", "hrrn", "edf", "priority", "default")}
KEPT_BY = "chat agent doc. batch"
NOT_BELOW, OVER_FCFS, QUARTILE, FACTOR = 0.9, 1.5, 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Kind:
    """Prompt and answer: median, spread of the logarithm, most tokens."""

    name: str
    share: float
    prompt: tuple[float, float, int]
    answer: tuple[float, float, int]
    max_tokens: int
    slo: Slo
    priority: int


KINDS = (
    Kind("chat", 0.45, (60, 0.8, 500), (60, 0.7, 250), 256, Slo(ttft=8.0, tpot=0.5), 0),
    Kind("agent", 0.20, (250, 0.6, 1000), (20, 0.6, 80), 128, Slo(deadline=40.0), 0),
    Kind("document", 0.20, (700, 0.4, 2000), (50, 0.6, 200), 256, Slo(ttft=40.0, tpot=0.6), 1),
    Kind("batch", 0.15, (150, 0.8, 1000), (120, 0.6, 400), 512, Slo(deadline=240.0), 2),
)


def mixed(count: int, seed: int) -> list[Arrival]:
    draw = random.Random(seed)
    kinds = draw.choices(KINDS, [kind.share for kind in KINDS], k=count)
    return [
        Arrival(
            0.0,
            _length(draw, *kind.prompt),
            _length(draw, *kind.answer),
            kind.max_tokens,
            kind.name,
            priority=kind.priority,
            slo=kind.slo,
        )
        for kind in kinds
    ]


def _length(draw: random.Random, middle: float, sigma: float, most: int) -> int:
    return max(2, min(most, round(draw.lognormvariate(math.log(middle), sigma))))


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one run: goodput in requests per second, shares of one."""

    goodput: float
    attainment: float
    quartiles: list[float]
    classes: dict[str, float]
    refused: float

    @classmethod
    def of(cls, run: Run) -> Kept:
        kept = np.array([one.kept for one in run.served])
        lengths = np.array([one.request.prompt_len + one.request.output_len for one in run.served])
        quartile = np.searchsorted(np.quantile(lengths, [0.25, 0.5, 0.75]), lengths)
        kind = np.array([one.request.request_class for one in run.served])
        return cls(
            float(kept.sum() / max(one.arrival for one in run.served)),
            float(kept.mean()),
            [float(kept[quartile == i].mean()) for i in range(4)],
            {one.name: float(kept[kind == one.name].mean()) for one in KINDS},
            float(np.mean([not math.isnan(one.refused) for one in run.served])),
        )

    @property
    def evenness(self) -> float:
        """The worst quartile's attainment over the mean."""
        return min(self.quartiles) / self.attainment


def admitting(handle: int, *args: object) -> Scheduler:
    """A scheduler that admits one request whatever is predicted for it."""
    scheduler = Scheduler.of(*args)
    usual = scheduler._intake._judge

    def judge(row: int, request: Request, now: float) -> None:
        if request.handle == handle:
            scheduler.forecaster.accepted(row)
        else:
            usual(row, request, now)

    scheduler._intake._judge = judge
    return scheduler


def step_down(rate: float, seed: int) -> list[Arrival]:
    """Traffic at 1.5 and then at 0.7."""
    high = [one for one in poisson(mixed(int(3 * rate * BEFORE), seed), LOADS[-1] * rate, seed) if one.at < BEFORE]
    low = [one for one in poisson(mixed(int(2 * rate * AFTER), seed + 500), LOW * rate, seed) if one.at < AFTER]
    return high + [replace(one, at=BEFORE + one.at) for one in low]


@dataclass(frozen=True, slots=True)
class Told:
    """Of a refused request, in seconds."""

    predicted: float
    waited: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.waited


def refusals(rate: float, seed: int, most: int) -> list[Told]:
    """What refused clients were told, and the truth."""
    config = replace(ENGINE, policy="slo", admission="refuse")
    traffic = step_down(rate, seed)
    refused = {
        index: one.refused
        for index, one in enumerate(paced.run(config, traffic).served)
        if not math.isnan(one.refused) and one.arrival > BEFORE - 20.0
    }
    chosen = random.Random(seed).sample(sorted(refused), min(most, len(refused)))
    return [
        Told(refused[index], paced.run(config, traffic, build=partial(admitting, index)).served[index].ttft)
        for index in sorted(chosen)
    ]


def measure(rate: float, seeds: list[int], count: int, table: Table) -> dict[str, dict[float, list[Kept]]]:
    """Every arm at every load."""
    seen: dict[str, dict[float, list[Kept]]] = {}
    for load in LOADS:
        for name, (policy, admission) in (OURS | OTHERS).items():
            config = replace(ENGINE, policy=policy, admission=admission)
            kept = [Kept.of(paced.run(config, poisson(mixed(count, seed), load * rate, seed))) for seed in seeds]
            seen.setdefault(name, {})[load] = kept
            console.print(f"{name} at {load}: done")
            table.add_row(
                f"{load}" if name == next(iter(OURS)) else "",
                name,
                spread([one.goodput for one in kept], 3),
                f"{mean(one.attainment for one in kept):.0%}",
                " ".join(f"{mean(one.quartiles[i] for one in kept):.2f}" for i in range(4)),
                f"{mean(one.evenness for one in kept):.2f}",
                " ".join(f"{mean(one.classes[kind.name] for one in kept):.2f}" for kind in KINDS),
                f"{mean(one.refused for one in kept):.0%}",
            )
    return seen


def judge(seen: dict[str, dict[float, list[Kept]]], name: str) -> tuple[float, float, float]:
    """Medians over the seeds: the least goodput over the best at a lower load, goodput over FCFS's at the highest load,
    and the evenness at the worst."""
    goodput = [median(one.goodput for one in seen[name][load]) for load in LOADS]
    lasting = min(goodput[i] / max(goodput[: i + 1]) for i in range(len(LOADS)))
    ratios = [
        ours.goodput / fcfs.goodput for ours, fcfs in zip(seen[name][LOADS[-1]], seen["fcfs"][LOADS[-1]], strict=True)
    ]
    return lasting, median(ratios), min(median(one.evenness for one in seen[name][load]) for load in LOADS)


def main(args: Namespace) -> int:
    count, number, probes = (QUICK_COUNT, QUICK_SEEDS, QUICK_PROBES) if args.quick else (COUNT, SEEDS, PROBES)
    seeds = [args.seed + i for i in range(number)]
    rate = paced.request_rate(replace(ENGINE, policy="fcfs"), mixed(1_500, 999))
    table = Table(
        title=f"promises, paced: {count * number:,} requests an arm and load, capacity {rate:.3f}/s", box=None
    )
    for column in ("load", "order", "goodput 1/s", "kept", "kept by quartile", "worst/mean", KEPT_BY, "refused"):
        table.add_column(column, no_wrap=True)
    seen = measure(rate, seeds, count, table)
    passed, said = True, []
    for name in OURS:
        lasting, over, evenness = judge(seen, name)
        passed &= lasting >= NOT_BELOW and over >= OVER_FCFS and evenness >= QUARTILE
        said.append(
            f"{name}: never below {lasting:.2f} of its best so far, {over:.1f} x FCFS at 1.5, worst quartile "
            f"{evenness:.2f} of the mean"
        )
    told = [one for seed in seeds for one in refusals(rate, seed, probes)]
    ratios = [one.ratio for one in told]
    middle = median(ratios)
    within = mean(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    passed &= 1 / FACTOR <= middle <= FACTOR
    low, high = np.percentile(ratios, [10, 90])
    notes = [
        f"refusals about the step down to {LOW}: {len(told)} looked at; predicted over true wait {middle:.2f} in the "
        f"median, {low:.2f} to {high:.2f} from the tenth to the ninetieth per cent, {within:.0%} within {FACTOR:g} x"
    ]
    if args.quick:
        notes.append(
            f"quick: {number} seeds of {count} requests and {probes} refusals, not {SEEDS} of {COUNT} and {PROBES}"
        )
    samples = {
        "arms": {
            name: {load: [asdict(one) for one in kept] for load, kept in runs.items()} for name, runs in seen.items()
        },
        "refusals": [asdict(one) for one in told],
    }
    sentence = f"{'; '.join(said)}; a refusal's predicted wait is {middle:.2f} x the truth ({within:.0%} within 2 x)."
    return Verdict(table, sentence, passed, samples, notes).conclude(args)


if __name__ == "__main__":
    sys.exit(main(arguments(__doc__).parse_args()))
