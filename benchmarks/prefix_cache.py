"""What the prefix index costs where nothing hits, and what it saves where prompts begin alike.

Paced: the real scheduler and loop on a virtual clock, ShareGPT's lengths in a closed loop with the rows full. Without
hits, the index can only cost host time: hashing blocks, remembering them, forgetting them. That time, on against off
and alternating, is counted as if the device stood still meanwhile; and what the device does must not change at all.
With hits: the same requests behind one of eight beginnings of 512 tokens.

Bar: 1 % of the throughput at most is lost without hits, with the step times of the embedded model here. Beside it: a
device twenty times as fast.
"""

from __future__ import annotations

import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, measured, spread
from headway.core.batch import Batch
from headway.core.config import SchedulerConfig
from headway.executors.base import Capacity
from headway.lab import paced
from headway.lab.drive import Run
from headway.lab.traffic import Arrival
from lengths import sharegpt_lengths

BAR = 0.01
ROUNDS, QUICK_ROUNDS = 5, 3
BEGINNINGS, BEGINNING = 8, 512
FASTER = 20
ON = SchedulerConfig(max_batch_size=64)
HOLDS = Capacity(num_blocks=2000, block_size=32, max_num_seqs=0, max_model_len=4096)
"""So few blocks that most of what is remembered must be forgotten again."""


def faster(batch: Batch) -> float:
    return paced.SMOLLM2(batch) / FASTER


def fresh(count: int, seed: int) -> list[Arrival]:
    """Prompts that share no block: tokens drawn at random."""
    draw = np.random.default_rng(seed)
    return [
        Arrival(0.0, draw.integers(1000, 32_000, prompt).astype(np.int32), answer)
        for prompt, answer in sharegpt_lengths(count, seed)
    ]


def alike(requests: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The same, each behind one of a few beginnings."""
    draw = np.random.default_rng(seed)
    beginnings = draw.integers(1000, 32_000, (BEGINNINGS, BEGINNING)).astype(np.int32)
    return [
        replace(one, prompt=np.concatenate([beginnings[draw.integers(BEGINNINGS)], np.asarray(one.prompt)]))
        for one in requests
    ]


def serve(requests: list[Arrival], *, index: bool) -> tuple[Run, float]:
    """The run, and the processor seconds that it took the host."""
    config = replace(ON, prefix_caching=index)
    began = time.process_time()
    run = paced.run(config, requests, step_times=faster, capacity=HOLDS, users=config.seqs)
    return run, time.process_time() - began


def main(args: Namespace) -> int:
    """Both parts; returns 1 where the bar is missed."""
    count, rounds = (1000, QUICK_ROUNDS) if args.quick else (5000, ROUNDS)
    requests = fresh(count, args.seed)
    costs: list[float] = []
    same = True
    with measured() as used:
        for _ in range(rounds):
            (off, host_off), (on, host_on) = serve(requests, index=False), serve(requests, index=True)
            costs.append(host_on - host_off)
            same &= on.duration == off.duration
            console.print(f"host {host_off:.2f} s without, {host_on:.2f} s with the index")
        begun_alike = alike(requests, args.seed)
        (plain, _), (saving, _) = serve(begun_alike, index=False), serve(begun_alike, index=True)
    device = on.stats.device_time
    losses = [cost / (device * FASTER) for cost in costs]
    fast_losses = [cost / device for cost in costs]
    table = Table(
        title=f"{count:,} ShareGPT requests, 64 rows, {HOLDS.num_blocks:,} blocks of 32", title_justify="left"
    )
    for heading in ("", "hit tokens", "forgotten blocks", "throughput, on / off", "mean TTFT, on / off"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, with_index, without in (("no two alike", on, off), ("eight beginnings", saving, plain)):
        ttft = with_index.values("ttft").mean() / without.values("ttft").mean()
        table.add_row(
            name,
            f"{with_index.stats.num_prefix_hits / with_index.stats.num_prefix_queries:.1%}",
            f"{with_index.stats.num_forgotten_blocks:,}",
            f"{with_index.output_throughput / without.output_throughput:.3f}",
            f"{ttft:.3f}",
        )
    loss = statistics.median(losses)
    passed = same and loss <= BAR
    notes = [
        f"host time that the index costs, of device time, per cent: {spread([100 * one for one in losses], 3)} here, "
        f"{spread([100 * one for one in fast_losses], 2)} where steps are {FASTER} times as fast",
        "without hits the device does the same, step by step" if same else "without hits the device's time changed",
    ]
    if args.quick:
        notes.append(f"--quick: {count:,} requests, {rounds} rounds")
    sentence = (
        f"Where nothing hits the prefix index costs {loss:.3%} of the throughput (bar {BAR:.0%}): "
        f"{'met' if passed else 'MISSED'}."
    )
    samples = {"host_seconds": costs, "device_seconds": device, "losses": losses}
    return Verdict(table, sentence, passed, samples, notes, used.others).conclude(args)


if __name__ == "__main__":
    sys.exit(main(arguments(__doc__).parse_args()))
