"""No short request behind a giant: the default order of service against first come, first served and HRRN.

Paced: the real scheduler and loop on a virtual clock, with step times of the embedded model. Prompts are computed in
chunks of which up to five share a step; all orders have the same engine.

Part one: eight short requests come right behind a giant that does not fit into the KV blocks that are free. Strict
first come, first served (no backfilling) lets them wait until it does.

Part two: chat among documents, 60 s of Poisson arrivals and then drained, at loads of what first come, first served
finishes in a closed loop with its rows full. Percentiles are over the requests of all runs together; the short half are
those with prompts of at most the median length.

Bars: median TTFT of the eight at most 0.05 times strict FCFS's, the giant's at most 1.05 times. At 0.95 and 1.2, P99
TTFT of the short half at most 0.1 times FCFS's and mean TTFT at most 1.02 times HRRN's; at 0.5, mean TTFTs within 3 %
in the median of the seeds (in 60 s, chance may bring so many documents together that it is another load).
"""

from __future__ import annotations

import math
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from rich.table import Table

from common import Verdict, arguments
from headway.core.config import SchedulerConfig
from headway.executors.base import Capacity
from headway.lab import paced
from headway.lab.drive import Run
from headway.lab.traffic import Arrival, poisson

ORDERS = ("fcfs", "hrrn", "srpt", "shortest", "default")
LOADS = (0.5, 0.95, 1.2)
SECONDS = 60.0
SEEDS, RUNS = 5, 8
QUICK_SEEDS, QUICK_RUNS = 2, 8
QUICK_ORDERS = ("fcfs", "hrrn", "default")
ENGINE = SchedulerConfig(
    batching="continuous",
    max_batch_size=16,
    max_num_batched_tokens=40,
    max_num_partial_prefills=5,
    prefix_caching=False,
)
"""Rows and tokens that take 0.2 to 0.3 s a step. Continuous, so that nothing but the order decides who waits."""


def lognormal(draw: random.Random, median: float, sigma: float, most: int) -> int:
    return max(4, min(most, round(draw.lognormvariate(math.log(median), sigma))))


def mixed(count: int, seed: int) -> list[Arrival]:
    """Chat with prompts of about 20 tokens, and 12 % documents of about 800. Answers of about 5."""
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        document = draw.random() < 0.12
        prompt = lognormal(draw, 800, 0.3, 2000) if document else lognormal(draw, 20, 0.7, 400)
        requests.append(Arrival(0.0, prompt, lognormal(draw, 5, 0.6 if document else 0.8, 400)))
    return requests


@dataclass(frozen=True, slots=True)
class Behind:
    """TTFTs in seconds."""

    shorts: float
    giant: float


def behind_a_giant(policy: str, backfill: bool, seed: int) -> Behind:
    """Six requests hold three quarters of the blocks; a giant that needs half of them comes, eight shorts behind it."""
    draw = random.Random(seed)
    blocks = Capacity(num_blocks=256, block_size=16, max_num_seqs=0, max_model_len=4096)
    holders = [Arrival(0.0, 460 + draw.randrange(20), 200 + draw.randrange(60)) for _ in range(6)]
    at = 20.0 + draw.random()
    giant = Arrival(at, 2000 + draw.randrange(100), 10)
    shorts = [Arrival(at + 0.01 * (i + 1), 12 + draw.randrange(8), 6) for i in range(8)]
    config = replace(ENGINE, max_batch_size=16, max_num_batched_tokens=128, policy=policy, backfill=backfill)
    run = paced.run(config, [*holders, giant, *shorts], capacity=blocks)
    return Behind(median(one.ttft for one in run.served[7:]), run.served[6].ttft)


@dataclass(slots=True)
class Latencies:
    """TTFT and E2E of requests, in seconds, who belongs to the short half, and of which seed each is."""

    ttft: np.ndarray
    e2e: np.ndarray
    short: np.ndarray
    seed: np.ndarray

    @classmethod
    def of(cls, runs: list[Run], seeds: list[int]) -> Latencies:
        ttft = np.concatenate([run.values("ttft") for run in runs])
        e2e = np.concatenate([run.values("e2e") for run in runs])
        prompts = np.array([one.request.prompt_len for run in runs for one in run.served])
        seed = np.repeat(seeds, [len(run.served) for run in runs])
        return cls(ttft, e2e, prompts <= np.median(prompts), seed)

    def means(self) -> np.ndarray:
        """Mean TTFT of each seed."""
        return np.array([self.ttft[self.seed == seed].mean() for seed in np.unique(self.seed)])

    @property
    def short_p99(self) -> float:
        return float(np.percentile(self.ttft[self.short], 99))


def serve(policy: str, load: float, rate: float, seeds: list[int]) -> Latencies:
    runs = []
    for seed in seeds:
        requests = poisson(mixed(int(2 * rate * SECONDS) + 20, seed), rate, seed)
        requests = [request for request in requests if request.at < SECONDS]
        runs.append(paced.run(replace(ENGINE, policy=policy), requests))
    return Latencies.of(runs, [seed // 1000 for seed in seeds])


def first_part(seeds: list[int], table: Table) -> tuple[bool, dict[str, object]]:
    arms = {"strict fcfs": ("fcfs", False), "fcfs, backfilled": ("fcfs", True), "default": ("default", True)}
    samples: dict[str, list[Behind]] = {
        name: [behind_a_giant(*arm, seed) for seed in seeds] for name, arm in arms.items()
    }
    strict = samples["strict fcfs"]
    kept = True
    for name, seen in samples.items():
        shorts = median(one.shorts / other.shorts for one, other in zip(seen, strict, strict=True))
        giant = median(one.giant / other.giant for one, other in zip(seen, strict, strict=True))
        short_ttft, giant_ttft = median(one.shorts for one in seen), median(one.giant for one in seen)
        table.add_row(
            "behind a giant", name, f"{short_ttft:.2f} s ({shorts:.3f} x)", f"{giant_ttft:.1f} s ({giant:.2f} x)"
        )
        if name == "default":
            kept = shorts <= 0.05 and giant <= 1.05
    return kept, {name: [(one.shorts, one.giant) for one in seen] for name, seen in samples.items()}


def second_part(
    rate: float, orders: Sequence[str], seeds: list[int], table: Table
) -> tuple[bool, str, dict[str, object]]:
    kept, ratios, samples = True, [], {}
    for load in LOADS:
        seen = {}
        for policy in orders:
            seen[policy] = serve(policy, load, load * rate, seeds)
            samples[f"{policy} at {load}"] = {name: getattr(seen[policy], name).tolist() for name in ("ttft", "short")}
        fcfs, mean = seen["fcfs"].short_p99, {policy: float(one.ttft.mean()) for policy, one in seen.items()}
        by_seed = np.array([one.means() for one in seen.values()])
        ties = by_seed.max(axis=0) / by_seed.min(axis=0) - 1
        tie = float(np.median(ties))
        for policy, one in seen.items():
            title = f"load {load}, {len(one.ttft):,} requests"
            spread = f"{tie:.1%} ({ties.min():.1%}-{ties.max():.1%})"
            note = f"   all tie within {spread}" if load == 0.5 and policy == "default" else ""
            table.add_row(
                title if policy == orders[0] else "",
                policy,
                f"{one.short_p99:.2f} s ({one.short_p99 / fcfs:.3f} x)",
                f"{np.percentile(one.ttft, 99):.1f} s",
                f"{mean[policy]:.2f} s ({mean[policy] / mean['hrrn']:.3f} x){note}",
                f"{one.e2e.mean():.2f} s",
            )
        ratio = seen["default"].short_p99 / fcfs
        if load == 0.5:
            kept &= tie <= 0.03
        else:
            kept &= ratio <= 0.1 and mean["default"] <= 1.02 * mean["hrrn"]
            ratios.append(f"{ratio:.3f} at load {load}")
    return kept, " and ".join(ratios), samples


def run(args: Namespace) -> int:
    seeds, runs = (QUICK_SEEDS, QUICK_RUNS) if args.quick else (SEEDS, RUNS)
    chosen = [args.seed + i for i in range(seeds)]
    drawn = [1000 * seed + i for seed in chosen for i in range(runs)]
    table = Table(title=f"head of line, paced (seeds {chosen[0]} to {chosen[-1]}, {runs} runs of 60 s each)", box=None)
    for column in (
        "",
        "order",
        "TTFT of shorts: median of 8 / P99",
        "giant / P99 of all",
        "mean TTFT (x HRRN)",
        "mean E2E",
    ):
        table.add_column(column)
    behind_kept, behind = first_part(chosen, table)
    rate = paced.request_rate(replace(ENGINE, policy="fcfs"), mixed(2_000, 999))
    mixed_kept, ratios, samples = second_part(rate, QUICK_ORDERS if args.quick else ORDERS, drawn, table)
    notes = [f"capacity: {rate:.2f} requests/s; step times {paced.SMOLLM2}"]
    if args.quick:
        notes.append(f"quick: {seeds} seeds of {runs} runs instead of {SEEDS} of {RUNS}, and no srpt and shortest")
    sentence = f"The default order's P99 TTFT of the short half is, of first come, first served's, {ratios}."
    verdict = Verdict(table, sentence, behind_kept and mixed_kept, {"behind": behind, "mixed": samples}, notes)
    return verdict.conclude(args)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__).parse_args()))
