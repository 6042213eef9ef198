"""Padding with and without length clusters, in dynamic groups of 16 ShareGPT requests.

Paced: the real engine loop on a virtual clock with SmolLM2's step times and a steady backlog of 384 requests (the next
comes as one ends), so that there is somebody to choose from. Arms over the same requests: no clusters; clusters by
prompt length alone (answers end by themselves, all that is known of them is max_tokens); with answer lengths as
OutputLengthPredictor learns them from those that ended; and with answer lengths known exactly. Waste is the share of
computed tokens that nobody wanted. The bound is what the backlog takes without clusters, and it is checked request by
request: from the moment at which one has waited that long, nobody who came later may join before it.

Bar: with known lengths waste <= 0.4 x unclustered, and the bound kept in every arm.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, spread
from headway.core.batch import Longs
from headway.core.config import SchedulerConfig
from headway.core.scheduler import Scheduler
from headway.core.table import RequestTable
from headway.lab import paced, traffic
from headway.lab.drive import Run
from lengths import sharegpt_lengths

SIZE, MAX_TOKENS = 16, 1024
BACKLOG, BAR = 384, 0.4
Build = Callable[[SchedulerConfig, int, int, int], Scheduler]


def config(clusters: bool, wait: float = 0.0) -> SchedulerConfig:
    return SchedulerConfig(
        batching="dynamic",
        policy="fcfs",
        length_clusters=clusters,
        cluster_wait=wait,
        max_batch_size=SIZE,
        depth=1,
        prefix_caching=False,
    )


def unknown(table: RequestTable, rows: Longs) -> None:
    """Rows of no group, of whose lengths nothing is learnt: max_tokens is all that is expected."""
    table.length_group[rows] = -1


def ignorant(config: SchedulerConfig, num_blocks: int, block_size: int, max_model_len: int) -> Scheduler:
    scheduler = Scheduler.of(config, num_blocks, block_size, max_model_len)
    scheduler.output_length.begin = unknown
    return scheduler


def overtakings(run: Run, wait: float) -> tuple[int, int]:
    """How often a request that had lost patience was passed by one that came later, and how many lost patience."""
    arrival = np.array([one.arrival for one in run.served])
    computing = [one.state_times.get("prefill", 0.0) + one.state_times.get("decode", 0.0) for one in run.served]
    joined = np.array([one.finished for one in run.served]) - computing
    patient_until = arrival + wait
    broken = lost = 0
    for i in np.flatnonzero(joined > patient_until + 1e-6):
        lost += 1
        before = (joined >= patient_until[i]) & (joined < joined[i] - 1e-6)
        broken += int(np.count_nonzero(before & (arrival > arrival[i])))
    return broken, lost


def requests(count: int, seed: int, known: bool) -> list[traffic.Arrival]:
    """Whose answers are asked for at their exact length, or end by themselves."""
    lengths = [(prompt, min(answer, MAX_TOKENS)) for prompt, answer in sharegpt_lengths(count, seed)]
    return [traffic.Arrival(0.0, prompt, answer, None if known else MAX_TOKENS) for prompt, answer in lengths]


def measure(work: list[traffic.Arrival], users: int, wait: float, clusters: bool, build: Build) -> dict[str, float]:
    run = paced.run(config(clusters, wait), work, users=users, build=build)
    broken, lost = overtakings(run, wait)
    stats = run.stats
    return {
        "waste": run.padding_waste,
        "pads": stats.num_pad_tokens / stats.num_batched_tokens,
        "throughput": run.output_throughput,
        "wait": max(one.e2e for one in run.served),
        "lost patience": lost,
        "broken": broken,
        "seconds": run.duration,
    }


def one_seed(count: int, users: int, seed: int) -> dict[str, dict[str, float]]:
    """Every arm over the same requests."""
    known, natural = requests(count, seed, True), requests(count, seed, False)
    make = Scheduler.of
    plain = measure(known, users, 1e9, False, make)
    wait = plain["seconds"] * users / count
    return {
        "no clusters": plain,
        "prompt lengths": measure(natural, users, wait, True, ignorant),
        "predicted answers": measure(natural, users, wait, True, make),
        "known answers": measure(known, users, wait, True, make),
    }


def main(args: Namespace) -> int:
    count, users = 1_000 if args.quick else 5_000, BACKLOG + SIZE
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(5)]
    runs = []
    for seed in seeds:
        runs.append(one_seed(count, users, seed))
        console.print(f"seed {seed}: done")
    table = Table(title=f"{count:,} ShareGPT requests in groups of {SIZE}, medians with min and max")
    for name in (
        "clusters by",
        "waste %",
        "of unclustered",
        "padding / wanted",
        "output tok/s",
        "impatient",
        "passed then",
    ):
        table.add_column(name, justify="right")
    for name in runs[0]:
        each = {key: [run[name][key] for run in runs] for key in runs[0][name]}
        ratios = [run[name]["waste"] / run["no clusters"]["waste"] for run in runs]
        table.add_row(
            name,
            spread([100 * waste for waste in each["waste"]]),
            spread(ratios, 2),
            spread(each["pads"], 2),
            spread(each["throughput"]),
            spread(each["lost patience"], 0),
            str(int(sum(each["broken"]))),
        )
    ratio = statistics.median(run["known answers"]["waste"] / run["no clusters"]["waste"] for run in runs)
    guessed = statistics.median(run["predicted answers"]["waste"] / run["no clusters"]["waste"] for run in runs)
    broken = int(sum(arm["broken"] for run in runs for arm in run.values()))
    sentence = (
        f"Length clusters waste {ratio:.2f} x what unclustered groups do where answer lengths are known, {guessed:.2f} "
        f"x where they are predicted; the bound on waiting was broken {broken} times (bars {BAR} and 0)."
    )
    less = f"{count:,} requests and one seed instead of 5,000 and five: more of it is the drain, without a backlog"
    notes = [f"--quick: {less}"] if args.quick else []
    return Verdict(table, sentence, ratio <= BAR and not broken, {"runs": runs}, notes).conclude(args)


if __name__ == "__main__":
    sys.exit(main(arguments(__doc__).parse_args()))
