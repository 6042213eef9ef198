"""The latency budget against fixed ones: does it keep the promise to those who decode, and at what throughput?

Paced: the real engine loop on a virtual clock, SmolLM2's step times with 3 % of noise, chat among long documents, all
waiting from the start, so that throughput is the most that a budget yields. The promise: half as long again as a full
step that only decodes. A mixed step has rows that decode and prompts; a fixed budget keeps the promise if 99 % of its
mixed steps do. The latency budget knows nothing of the device but what its own steps teach it, the first ones included.

Bar: at least 99 % of mixed steps inside the promise, at 0.9 x the throughput of the best fixed budget that keeps it.
"""

from __future__ import annotations

import random
import statistics
import sys
from argparse import Namespace
from typing import Any

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, spread
from headway.core.batch import Batch
from headway.core.config import SchedulerConfig
from headway.lab import paced, traffic
from headway.lab.drive import Run

ROWS = 32
FIXED = (40, 48, 56, 64, 72, 80, 96, 128, 256, 512)
LARGEST = FIXED[-1]
INSIDE, BAR = 0.99, 0.9
NOISE = 0.03


class NoisyDevice:
    """SmolLM2's step times, each off by some per cent, and a note of those that decode and prefill together."""

    def __init__(self, seed: int) -> None:
        self.mixed: list[float] = []
        self._draw = random.Random(seed)

    def __call__(self, batch: Batch) -> float:
        seconds = paced.SMOLLM2(batch) * self._draw.lognormvariate(0.0, NOISE)
        decodes = batch.samples & (batch.num_tokens == 1)
        if decodes.any() and (batch.num_tokens > 1).any():
            self.mixed.append(seconds)
        return seconds


def promise() -> float:
    """Half as long again as a full step of decodes with 600 tokens of context each."""
    times = paced.SMOLLM2
    return 1.5 * (times.base + ROWS * (times.per_token + times.per_row + 600 * times.per_kv_token))


def config(budget: str, tokens: int) -> SchedulerConfig:
    return SchedulerConfig(
        policy="fcfs", budget=budget, max_num_batched_tokens=tokens, max_batch_size=ROWS, tpot_slo=promise()
    )


def measure(requests: list[traffic.Arrival], budget: str, tokens: int, seed: int) -> dict[str, float]:
    """The share of mixed steps inside the promise, the longest of them over it, and output tokens per second."""
    device = NoisyDevice(seed)
    run: Run = paced.run(config(budget, tokens), traffic.at_once(requests), step_times=device)
    inside = float(np.mean(np.array(device.mixed) <= promise())) if device.mixed else 1.0
    return {
        "inside": inside,
        "worst": max(device.mixed) / promise(),
        "throughput": run.output_throughput,
        "mixed steps": len(device.mixed),
        "ITL P99 ms": 1e3 * run.percentile("itl", 99),
    }


def main(args: Namespace) -> int:
    count, fixed = (400, FIXED[1::2]) if args.quick else (5_000, FIXED)
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(5)]
    arms = {f"fixed {tokens}": ("decode-first", tokens) for tokens in fixed} | {"latency": ("latency", LARGEST)}
    samples: dict[str, Any] = {"promise": promise(), "runs": {}}
    table = Table(title=f"promise {1e3 * promise():.0f} ms, {count:,} requests, medians with min and max")
    for name in ("budget", "mixed steps", "inside %", "longest / promise", "ITL P99 ms", "output tok/s"):
        table.add_column(name, justify="right")
    for name, arm in arms.items():
        runs = [measure(traffic.chat_and_documents(count, seed), *arm, seed) for seed in seeds]
        samples["runs"][name] = runs
        each = {key: [run[key] for run in runs] for key in runs[0]}
        table.add_row(
            name,
            spread(each["mixed steps"], 0),
            spread([100 * share for share in each["inside"]], 2),
            spread(each["worst"], 2),
            spread(each["ITL P99 ms"], 0),
            spread(each["throughput"]),
        )
        console.print(f"{name}: done")
    runs = samples["runs"]
    ours = runs.pop("latency")
    keeping = [name for name, each in runs.items() if min(run["inside"] for run in each) >= INSIDE]
    best = max(keeping, key=lambda name: statistics.median(run["throughput"] for run in runs[name]), default=None)
    runs["latency"] = ours
    inside = min(run["inside"] for run in ours)
    against = runs[best] if best else ours
    ratio = statistics.median(
        mine["throughput"] / other["throughput"] for mine, other in zip(ours, against, strict=True)
    )
    sentence = (
        f"The latency budget keeps {100 * inside:.2f} % of mixed steps inside the promise at {ratio:.2f} x the "
        f"throughput of {best or 'no'} tokens, the best fixed budget to keep it (bars {100 * INSIDE:.0f} % and {BAR})."
    )
    less = f"{count:,} requests, one seed and {len(fixed)} fixed budgets instead of 5,000, five and {len(FIXED)}"
    notes = [f"--quick: {less}"] if args.quick else []
    return Verdict(table, sentence, inside >= INSIDE and ratio >= BAR, samples, notes).conclude(args)


if __name__ == "__main__":
    sys.exit(main(arguments(__doc__).parse_args()))
