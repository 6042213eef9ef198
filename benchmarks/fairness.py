"""What fair sharing between tenants is worth, and what it costs.

Paced: the real scheduler and loop on a virtual clock with the step times of the embedded model. Prompts are two of
ShareGPT's joined, each behind one of its tenant's beginnings; answers are a quarter of ShareGPT's. 12 rows, 48 tokens a
step, one step launched at a time, 16,384 tokens that a tenant may catch up on; the arms differ in the policy alone.

1. One tenant floods (1.2 times what the machine can do, and 150 requests at the start), the quiet one sends at half of
   its share: its mean time to first token is 1.2 times what it is without the flood, or less.
2. Both have more to do than there is room for, weights 2 : 1: in every window of 30 s the service that they get,
   divided by their weights, differs by 5 % or less. Service is what was computed for them, counted from the steps.
3. Meanwhile the throughput is 0.95 of first come, first served's or more, and the share of prompt tokens found in the
   prefix index 0.9 or more of the same; beside it that of `lpm`, which looks at nothing else.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, measured, spread
from headway.core.batch import Batch, StepEvents, StepOutput
from headway.core.config import SchedulerConfig
from headway.core.scheduler import Scheduler
from headway.core.table import Floats
from headway.core.tenants import Tenant
from headway.executors.base import Capacity
from headway.lab import paced, traffic
from headway.lab.drive import Run
from headway.lab.traffic import Arrival
from lengths import sharegpt_lengths

REQUESTS, QUICK_REQUESTS = 5000, 1200
WINDOW = 30.0
TTFT, SERVICE, THROUGHPUT, HITS = 1.2, 0.05, 0.95, 0.9
SHOWN = ("ttft ratio", "worst window", "throughput ratio", "hit ratio", "hit ratio to lpm")
WEIGHTS = {"large": 2.0, "small": 1.0}
CONFIG = SchedulerConfig(
    batching="continuous",
    depth=1,
    max_batch_size=12,
    max_num_batched_tokens=48,
    max_num_partial_prefills=1,
    max_overtaking=16_384,
    tenants={name: Tenant(weight) for name, weight in WEIGHTS.items()},
)
BEGINNINGS, BEGINNING = 20, 96
"""Of each tenant."""
TIGHT = Capacity(num_blocks=1200, block_size=16, max_num_seqs=0, max_model_len=4096)
"""For the part with the backlogs: so few blocks that beginnings which nobody uses for a while are forgotten."""


def requests(count: int, seed: int, tenant: str) -> list[Arrival]:
    """All at time 0; prompts of token ids."""
    draw = np.random.default_rng([seed, *tenant.encode()])
    lengths = sharegpt_lengths(2 * count, seed)
    beginnings = draw.integers(1000, 32_000, (BEGINNINGS, BEGINNING)).astype(np.int32)
    made = []
    for (one, answer), (other, _) in zip(lengths[::2], lengths[1::2], strict=True):
        rest = draw.integers(1000, 32_000, min(1500, one + other)).astype(np.int32)
        prompt = np.concatenate([beginnings[draw.integers(BEGINNINGS)], rest])
        made.append(Arrival(0.0, prompt, max(1, answer // 4), tenant=tenant))
    return made


class Metered(Scheduler):
    """Counts what the steps compute for whom."""

    steps: list[Step]

    def commit(self, batch: Batch, output: StepOutput, now: float) -> StepEvents:
        table = self.table
        codes = [table.code(tenant) for tenant in WEIGHTS]
        tokens = np.bincount(table.tenant[batch.rows], batch.num_tokens, 1 + max(codes))
        waiting = np.bincount(table.tenant[self.waiting.rows], minlength=1 + max(codes))
        self.steps.append(Step(now, tokens[codes], bool(waiting[codes].all())))
        return super().commit(batch, output, now)


@dataclass(frozen=True, slots=True)
class Step:
    """When it ended, tokens by tenant in the order of WEIGHTS, and whether all of these had requests in the queue."""

    at: float
    tokens: Floats
    backlogged: bool


def serve(policy: str, arrivals: list[Arrival], steps: list[Step], holds: Capacity) -> Run:
    def build(config: SchedulerConfig, num_blocks: int, block_size: int, max_model_len: int) -> Scheduler:
        scheduler = Metered.of(config, num_blocks, block_size, max_model_len)
        assert isinstance(scheduler, Metered)
        scheduler.steps = steps
        return scheduler

    return paced.run(replace(CONFIG, policy=policy), arrivals, capacity=holds, build=build)


def deviations(steps: list[Step]) -> list[float]:
    """For each window in which all had requests in the queue: how far the shares are from the weights, 0.05 being 5 %
    too much for the one, against the other."""
    found = []
    weights = np.array(list(WEIGHTS.values()))
    service, begun, backlogged = np.zeros(len(weights)), 0.0, True
    for step in steps:
        backlogged &= step.backlogged
        service += step.tokens
        if step.at - begun >= WINDOW:
            shares = service / weights
            if backlogged:
                found.append(float(shares.max() / max(1.0, shares.min()) - 1))
            service, begun, backlogged = np.zeros(len(weights)), step.at, True
    return found


def isolation(count: int, seed: int, capacity: float) -> dict[str, float]:
    """Mean time to first token of the quiet tenant: alone, beside a flood, and beside it first come, first served."""
    quiet = traffic.poisson(requests(count // 4, seed, "quiet"), capacity / 4, seed)
    flood = requests(count - count // 4, seed + 1, "flood")
    flood = flood[:150] + traffic.poisson(flood[150:], 1.2 * capacity, seed + 1)
    arms = {"alone": ("fair", quiet), "fair": ("fair", quiet + flood), "fcfs": ("fcfs", quiet + flood)}
    figures = {}
    for name, (policy, arrivals) in arms.items():
        console.print(f"quiet tenant, {name} ...", style="dim")
        run = serve(policy, arrivals, [], paced.AMPLE)
        own = [one for one in run.served if one.request.tenant == "quiet"]
        figures[f"{name} ttft"] = statistics.fmean(one.ttft for one in own)
        figures[f"{name} e2e"] = statistics.fmean(one.e2e for one in own)
    return figures


def backlog(count: int, seed: int, capacity: float) -> dict[str, Any]:
    """Two tenants, weights 2 : 1, that each send 1.3 times their share."""
    arrivals = []
    for tenant, share in (("large", 2 / 3), ("small", 1 / 3)):
        own = requests(round(count * share), seed, tenant)
        arrivals += own[:40] + traffic.poisson(own[40:], 1.3 * share * capacity, seed)
    figures: dict[str, Any] = {}
    for policy in ("fair", "fcfs", "lpm"):
        console.print(f"both backlogged, {policy} ...", style="dim")
        steps: list[Step] = []
        run = serve(policy, arrivals, steps, TIGHT)
        figures[policy] = {
            "deviations": deviations(steps),
            "throughput": run.output_throughput,
            "hits": run.stats.num_prefix_hits / run.stats.num_prefix_queries,
            "preemptions": run.stats.num_preemptions,
        }
    return figures


def one_seed(count: int, seed: int) -> dict[str, Any]:
    sample = requests(400, seed, "flood")
    capacity = paced.request_rate(replace(CONFIG, policy="fcfs"), sample)
    figures = {"capacity": capacity, **isolation(count, seed, capacity), "backlog": backlog(count, seed, capacity)}
    arms = figures["backlog"]
    fair, fcfs, lpm = arms["fair"], arms["fcfs"], arms["lpm"]
    return figures | {
        "ttft ratio": figures["fair ttft"] / figures["alone ttft"],
        "fcfs ttft ratio": figures["fcfs ttft"] / figures["alone ttft"],
        "e2e ratio": figures["fair e2e"] / figures["alone e2e"],
        "worst window": max(fair["deviations"]),
        "windows": len(fair["deviations"]),
        "fcfs median window": statistics.median(fcfs["deviations"]),
        "median window": statistics.median(fair["deviations"]),
        "throughput ratio": fair["throughput"] / fcfs["throughput"],
        "hit ratio": fair["hits"] / fcfs["hits"],
        "hit ratio to lpm": fair["hits"] / lpm["hits"],
    }


def main(args: Namespace) -> int:
    """Every seed; returns 1 where a bar is missed."""
    count = QUICK_REQUESTS if args.quick else REQUESTS
    results = []
    with measured() as used:
        for seed in range(args.seed, args.seed + (1 if args.quick else 5)):
            results.append(one_seed(count, seed))
            shown = ", ".join(f"{name} {results[-1][name]:.3f}" for name in SHOWN)
            console.print(f"seed {seed}: {shown}")

    def of(name: str) -> list[float]:
        return [result[name] for result in results]

    rows = [
        ("quiet tenant's mean TTFT / alone", "ttft ratio", f"<= {TTFT}", max(of("ttft ratio")) <= TTFT),
        ("... first come, first served", "fcfs ttft ratio", "", None),
        ("quiet tenant's mean E2E / alone", "e2e ratio", "", None),
        ("worst window of 30 s, off the weights", "worst window", f"<= {SERVICE}", max(of("worst window")) <= SERVICE),
        ("median window of 30 s", "median window", "", None),
        ("... first come, first served", "fcfs median window", "", None),
        ("throughput / fcfs", "throughput ratio", f">= {THROUGHPUT}", min(of("throughput ratio")) >= THROUGHPUT),
        ("prefix hit rate / fcfs", "hit ratio", f">= {HITS}", min(of("hit ratio")) >= HITS),
        ("prefix hit rate / lpm", "hit ratio to lpm", "", None),
    ]
    table = Table(
        title=f"{count:,} requests an arm, {len(results)} seeds from {args.seed}: median (min-max)",
        title_justify="left",
    )
    for heading in ("", "fair", "bar", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for text, name, bar, holds in rows:
        verdict = "" if holds is None else "met" if holds else "MISSED"
        table.add_row(text, spread(of(name), 3), bar, verdict)
    passed = all(holds for *_, holds in rows if holds is not None)
    notes = [
        f"{sum(of('windows')):.0f} windows in which both tenants had requests in the queue throughout",
        "beside the flood the quiet tenant's answers take longer (E2E): their steps carry the flood's rows, too",
        "with two steps launched at a time (depth 2) a full step is prepared already when a request comes, and the "
        "quiet tenant's TTFT is one step longer",
    ]
    if args.quick:
        notes.append(f"--quick: {count:,} requests an arm, one seed")
    sentence = (
        f"Beside a flood the quiet tenant's mean TTFT is {statistics.median(of('ttft ratio')):.2f} times that alone "
        f"({statistics.median(of('fcfs ttft ratio')):.0f} times by order of arrival), service is within "
        f"{max(of('worst window')):.1%} of the weights in every 30 s, throughput is "
        f"{statistics.median(of('throughput ratio')):.3f} and prefix hits {statistics.median(of('hit ratio')):.2f} of "
        f"fcfs's: {'all bars met' if passed else 'bars MISSED'}."
    )
    return Verdict(table, sentence, passed, {"seeds": results}, notes, used.others).conclude(args)


if __name__ == "__main__":
    sys.exit(main(arguments(__doc__).parse_args()))
