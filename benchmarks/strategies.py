"""What each strategy is worth: the real model in process, and the same arms paced on a virtual clock.

Four claims, each a ratio of two arms that differ in one setting of the scheduler:

1. at saturation, filling and draining left out, continuous batching yields 2.67 times static's output tokens per
   second;
2. at 0.8 of static's capacity its P99 time to first token is 0.1 of static's, its P99 end-to-end time per token 0.27;
3. with long prompts arriving at 0.8 of capacity, chunked prefill's P99 gap between tokens is half of that without,
   at 0.97 of the throughput or more;
4. with priorities at 0.95 of capacity the high class's median time to first token is half the low class's, its P99 a
   quarter of what it gets by order of arrival, at 0.97 of the throughput or more.

ShareGPT requests, at least 300 an arm; answers end at their length in the data set, prompts and answers divided by
--shrink. Long prompts are several joined. Static runs at its best batch size, chosen by paced runs with the step times
of the arm before; its claims are void unless it reaches 0.9 of what transformers' padded `generate` yields on the same
group. Every real arm is repeated on the virtual clock with the step times it has learnt: they must agree in order, and
within 10 %. Then the arms run paced with 5,000 requests and five seeds. Each arm's result goes to --json at once, and
what is there already is not run again; --arms runs some alone.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from common import arguments, console, measured
from headway.core.config import SchedulerConfig
from headway.engine.config import EngineConfig
from headway.engine.resolve import resolve_model
from headway.engine.text import Tokenizer
from headway.executors.machine import available_cores
from headway.lab import machine, paced, traffic
from headway.lab.compare import Live, sample
from headway.lab.drive import Run
from headway.lab.traffic import Arrival
from headway.lab.workload import sharegpt
from serving import Transformers, Work, fastest_dtype

LIVE_REQUESTS, PACED_REQUESTS, QUICK_REQUESTS, CLASSES_REQUESTS = 320, 5000, 600, 5000
STATIC_SIZES = (16, 32, 64)
LONG_EVERY, LONG_PROMPT = 8, 1024
HIGH_SHARE, SHORTER = 0.1, 4
"""Of the workload with classes: who is of the high one; and its answers are so much shorter, its requests so many more,
so that a queue has the time to build up."""
VOID_BELOW, AGREE = 0.9, 0.1
peer: Transformers

CONTINUOUS = SchedulerConfig(batching="continuous", policy="fcfs", max_batch_size=64, prefix_caching=False)
CHUNKED = replace(CONTINUOUS, max_batch_size=32, max_num_batched_tokens=128, max_num_partial_prefills=1)
FEW_ROWS = replace(CHUNKED, max_batch_size=8, batching="inflight")


def static(size: int) -> SchedulerConfig:
    return replace(CONTINUOUS, batching="static", max_batch_size=size, depth=1)


@dataclass(frozen=True, slots=True)
class Arm:
    """A configuration on one of the workloads; `load` is its arrivals over the capacity that the arm `of` has shown
    (a closed loop with the rows full where it is None). So near capacity a queue takes thousands of requests to build
    up: the first `backlog` come at once, about as many as wait in the long run."""

    workload: str
    config: Callable[[int], SchedulerConfig]
    load: float | None = None
    of: str | None = None
    backlog: int = 0


ARMS = {
    "saturated continuous": Arm("chat", lambda size: CONTINUOUS),
    "saturated static": Arm("chat", static),
    "loaded static": Arm("chat", static, 0.8, "saturated static"),
    "loaded continuous": Arm("chat", lambda size: CONTINUOUS, 0.8, "saturated static"),
    "long capacity": Arm("long", lambda size: CHUNKED),
    "long whole": Arm("long", lambda size: replace(CHUNKED, chunked_prefill=False), 0.8, "long capacity"),
    "long chunked": Arm("long", lambda size: CHUNKED, 0.8, "long capacity"),
    "classes capacity": Arm("classes", lambda size: FEW_ROWS),
    "classes fcfs": Arm("classes", lambda size: FEW_ROWS, 0.95, "classes capacity", backlog=20),
    "classes priority": Arm(
        "classes", lambda size: replace(FEW_ROWS, policy="priority"), 0.95, "classes capacity", backlog=20
    ),
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A ratio of two figures, and its bar: at least where `least`, else at most."""

    text: str
    ours: tuple[str, str]
    theirs: tuple[str, str]
    bar: float
    least: bool = False

    def ratio(self, figures: dict[str, dict[str, float]]) -> float:
        return figures[self.ours[0]][self.ours[1]] / figures[self.theirs[0]][self.theirs[1]]

    def holds(self, ratio: float) -> bool:
        return ratio >= self.bar if self.least else ratio <= self.bar


CLAIMS = (
    Claim(
        "saturated: continuous' output tok/s / static's",
        ("saturated continuous", "full tok/s"),
        ("saturated static", "full tok/s"),
        2.67,
        least=True,
    ),
    Claim("0.8 of static: P99 TTFT / static's", ("loaded continuous", "ttft p99"), ("loaded static", "ttft p99"), 0.1),
    Claim(
        "0.8 of static: P99 E2E per token / static's",
        ("loaded continuous", "e2e/token p99"),
        ("loaded static", "e2e/token p99"),
        0.27,
    ),
    Claim("long prompts: chunked P99 ITL / whole", ("long chunked", "itl p99"), ("long whole", "itl p99"), 0.5),
    Claim("long prompts: chunked tok/s / whole", ("long chunked", "tok/s"), ("long whole", "tok/s"), 0.97, least=True),
    Claim(
        "priority: high's P50 TTFT / low's",
        ("classes priority", "high ttft p50"),
        ("classes priority", "low ttft p50"),
        0.5,
    ),
    Claim(
        "priority: high's P99 TTFT / by arrival",
        ("classes priority", "high ttft p99"),
        ("classes fcfs", "high ttft p99"),
        0.25,
    ),
    Claim("priority: tok/s / by arrival", ("classes priority", "tok/s"), ("classes fcfs", "tok/s"), 0.97, least=True),
)


def workloads(count: int, seed: int, shrink: int, path: Path) -> dict[str, list[Arrival]]:
    """chat: ShareGPT; long: every eighth prompt is several joined; classes: a tenth at random is of the high class."""
    tokenizer = Tokenizer.load(path)
    items = sharegpt(count, tokenizer, seed=seed, max_prompt=LONG_PROMPT // shrink)
    prompts = [tokenizer.encode(str(item.prompt), add_special_tokens=False) for item in items]
    chat = [
        Arrival(0.0, prompt, max(1, round(item.output_len / shrink)))
        for prompt, item in zip(prompts, items, strict=True)
    ]
    draw = random.Random(seed)

    def long_prompt() -> list[int]:
        joined: list[int] = []
        while len(joined) < LONG_PROMPT:
            joined += draw.choice(prompts)
        return joined[:LONG_PROMPT]

    return {
        "chat": chat,
        "long": [
            replace(one, prompt=long_prompt()) if i % LONG_EVERY == LONG_EVERY - 1 else one
            for i, one in enumerate(chat)
        ],
        "classes": [_ranked(one, high=draw.random() < HIGH_SHARE) for one in chat * SHORTER],
    }


def _ranked(request: Arrival, high: bool) -> Arrival:
    output_len = max(1, request.output_len // SHORTER)
    return replace(request, output_len=output_len, request_class="high" if high else "low", priority=0 if high else 1)


def resampled(requests: list[Arrival], count: int, seed: int) -> list[Arrival]:
    """So many of the requests, drawn with replacement; only their lengths count."""
    lengths = [replace(request, prompt=request.prompt_len) for request in requests]
    return random.Random(seed).choices(lengths, k=count)


def figures(run: Run, config: SchedulerConfig) -> dict[str, float]:
    """What the claims are made of, in seconds, tokens and requests per second."""
    found = {
        "tok/s": run.output_throughput,
        "full tok/s": full_throughput(run),
        "requests/s": run.request_rate(config.seqs),
        "ttft p99": run.percentile("ttft", 99),
        "e2e/token p99": run.percentile("e2e_per_token", 99),
        "itl p99": run.percentile("itl", 99),
        "waste": run.padding_waste,
        "busy": run.busy,
    }
    for name in ("high", "low"):
        if (of_class := run.of_class(name)).served:
            found |= {f"{name} ttft p{percent}": of_class.percentile("ttft", percent) for percent in (50, 99)}
    return found


def full_throughput(run: Run) -> float:
    """Output tokens per second from a tenth to nine tenths of the run: while the rows are full. Of a request's tokens
    the times of the first and the last are known; those between are taken to come evenly."""
    begin, end = 0.1 * run.duration, 0.9 * run.duration
    made = 0
    for one in run.served:
        times = np.linspace(one.first_token, one.finished, one.output_len)
        made += int(np.count_nonzero((begin <= times) & (times < end)))
    return made / (end - begin)


def arrivals(arm: Arm, requests: list[Arrival], known: dict[str, dict[str, float]], seed: int) -> list[Arrival]:
    if arm.load is None or arm.of is None:
        return requests
    waiting, coming = traffic.at_once(requests[: arm.backlog]), requests[arm.backlog :]
    return waiting + traffic.poisson(coming, arm.load * known[arm.of]["requests/s"], seed)


def paced_arm(
    arm: Arm,
    requests: list[Arrival],
    known: dict[str, dict[str, float]],
    seed: int,
    size: int,
    step_times: paced.StepTimes,
) -> dict[str, float]:
    config = arm.config(size)
    users = config.seqs if arm.load is None else None
    return figures(paced.run(config, arrivals(arm, requests, known, seed), step_times=step_times, users=users), config)


def best_static(requests: list[Arrival], step_times: paced.StepTimes) -> int:
    """The batch size at which static batching yields most, by paced runs."""

    def throughput(size: int) -> float:
        users = 2 * size
        return paced.run(static(size), requests, step_times=step_times, users=users).output_throughput

    return max(STATIC_SIZES, key=throughput)


class Real:
    """The arms on the real model, one after the other; every result is kept in a file at once."""

    def __init__(self, args: Namespace, path: Path, work: dict[str, list[Arrival]]) -> None:
        self.args, self.path, self.work = args, path, work
        self.dtype = args.dtype or fastest_dtype(args.threads)
        self.kept: dict[str, Any] = {"arms": {}}
        if args.json and args.json.exists():
            self.kept = json.loads(args.json.read_text(encoding="utf-8"))
        self.kept |= {"machine": machine.facts(), "flags": {k: str(v) for k, v in vars(args).items()}}
        self._live: Live | None = None

    @property
    def arms(self) -> dict[str, Any]:
        return self.kept["arms"]

    @property
    def figures(self) -> dict[str, dict[str, float]]:
        return {name: kept["figures"] for name, kept in self.arms.items()}

    def step_times(self, name: str) -> paced.StepTimes:
        return paced.StepTimes(**self.arms[name]["step_times"])

    def run(self) -> None:
        for name in self.args.arms or ARMS:
            if name not in self.arms:
                self._run_arm(name)
        if not self.args.arms and "padded" not in self.kept:
            self._compare_padded()
        if self._live is not None:
            self._live.close()

    def _run_arm(self, name: str) -> None:
        arm = ARMS[name]
        if arm.of is not None and arm.of not in self.arms:
            raise SystemExit(f"{name!r} needs the capacity that {arm.of!r} shows: run that first, to the same --json")
        config, requests = arm.config(self._size(name)), arrivals(arm, self.work[arm.workload], self.figures, 1)
        live = self._model()
        users = config.seqs if arm.load is None else None
        with measured() as used, console.status(name) as status:

            def watch(ended: int) -> None:
                status.update(f"{name}: {ended} of {len(requests)} requests")

            run = live(config, requests, users, watch)
        self.arms[name] = {
            "config": asdict(config),
            "figures": figures(run, config),
            "step_times": asdict(live.step_times[-1]),
            "others_cores": used.others,
            "samples": [sample(one) for one in run.served],
        }
        self.save()
        console.print(f"{name}: {len(requests)} requests in {used.seconds:,.0f} s, {run.output_throughput:,.1f} tok/s")

    def _size(self, name: str) -> int:
        """Static's batch size."""
        if "static" in name and "static_size" not in self.kept:
            if "saturated continuous" not in self.arms:
                raise SystemExit("static's best size is found with step times: run 'saturated continuous' first")
            self.kept["static_size"] = best_static(self.work["chat"], self.step_times("saturated continuous"))
            console.print(f"static's best batch size, by paced runs: {self.kept['static_size']}")
        return self.kept.get("static_size", 0)

    def _model(self) -> Live:
        if self._live is None:
            limits = SchedulerConfig(max_batch_size=64)
            config = EngineConfig(
                model=self.args.model, dtype=self.dtype, max_model_len=2048, threads=self.args.threads, scheduler=limits
            )
            self._live = Live(config, str(self.path), report=console.print)
            warm = [Arrival(0.0, one.prompt, 4) for one in self.work["chat"][:8]]
            self._live(CONTINUOUS, warm)
        return self._live

    def _compare_padded(self) -> None:
        """One static group here and in transformers, alternating: wanted tokens per second."""
        size = self._size("static")
        group = traffic.at_once(self.work["chat"][:size])
        work = [Work(list(one.prompt), one.output_len) for one in group]  # type: ignore[arg-type]
        wanted = sum(one.output_len for one in group)
        rates: dict[str, list[float]] = {"static": [], "transformers": []}
        # In a process of its own: two teams of OpenMP threads in one process put each other to sleep.
        with ProcessPoolExecutor(1, get_context("spawn"), load, (self.path, self.dtype, self.args.threads)) as theirs:
            for _ in range(self.args.runs):
                rates["static"].append(self._model()(static(size), group).output_throughput)
                rates["transformers"].append(wanted / theirs.submit(generate, work).result())
        self.kept["padded"] = rates
        self.save()

    def save(self) -> None:
        if self.args.json:
            self.args.json.write_text(json.dumps(self.kept, indent=1) + "\n", encoding="utf-8")

    def twins(self) -> dict[str, dict[str, float]]:
        """Every arm once more, paced, with the step times that it has learnt and at the rates that it had."""
        return {
            name: paced_arm(
                arm,
                self.work[arm.workload],
                self.figures,
                1,
                self._size(name),
                self.step_times(name),
            )
            for name, arm in ARMS.items()
        }


def load(path: Path, dtype: str, threads: int) -> None:
    """In the process of the peer."""
    global peer
    peer = Transformers(path, dtype, threads)


def generate(work: list[Work]) -> float:
    """Seconds, in the process of the peer."""
    begin = time.perf_counter()
    peer.generate(work)
    return time.perf_counter() - begin


def paced_seeds(
    work: dict[str, list[Arrival]], seeds: list[int], count: int, size: int | None, step_times: paced.StepTimes
) -> list[dict[str, dict[str, float]]]:
    """All arms paced, for each seed: the figures by arm."""
    results = []
    for seed in seeds:
        drawn = {
            name: resampled(requests, max(CLASSES_REQUESTS, count) if name == "classes" else count, seed)
            for name, requests in work.items()
        }
        size = size or best_static(drawn["chat"][: count // 4], step_times)
        known: dict[str, dict[str, float]] = {}
        for name, arm in ARMS.items():
            with console.status(f"paced, seed {seed}: {name}"):
                known[name] = paced_arm(arm, drawn[arm.workload], known, seed, size, step_times)
        results.append(known)
    return results


def agreement(real: dict[str, dict[str, float]], twin: dict[str, dict[str, float]]) -> list[str]:
    """Where paced and real differ by more than 10 % in a figure that a claim uses, or in who is ahead."""
    faults = []
    for claim in CLAIMS:
        for name, figure in (claim.ours, claim.theirs):
            off = twin[name][figure] / real[name][figure] - 1
            if abs(off) > AGREE:
                faults.append(f"{name}, {figure}: paced {off:+.0%}")
        if (claim.ratio(real) > 1) != (claim.ratio(twin) > 1) and abs(claim.ratio(real) - 1) > AGREE:
            faults.append(f"{claim.text}: paced and real differ in order")
    return sorted(set(faults))


def table(real: dict[str, dict[str, float]] | None, results: list[dict[str, dict[str, float]]]) -> tuple[Table, bool]:
    """One row a claim; and whether all hold, in the real runs and in the median of the paced ones."""
    shown = Table(title="ratios of two arms that differ in one setting", title_justify="left")
    for heading in ("", "real model", "paced, median (min-max)", "bar", ""):
        shown.add_column(heading, justify="left" if not heading else "right")
    passed = True
    for claim in CLAIMS:
        ratios = [claim.ratio(known) for known in results]
        median = statistics.median(ratios)
        measured_ratios = [median] if real is None else [median, claim.ratio(real)]
        holds = all(map(claim.holds, measured_ratios))
        passed &= holds
        shown.add_row(
            claim.text,
            "-" if real is None else f"{claim.ratio(real):.3f}",
            f"{median:.3f} ({min(ratios):.3f}-{max(ratios):.3f})",
            f"{'>=' if claim.least else '<='} {claim.bar:g}",
            "met" if holds else "MISSED",
        )
    return shown, passed


def main() -> int:
    """Runs what the flags ask for; returns 1 where a bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="folder or .gguf file (default: the embedded model)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="(default: what transformers is faster in)")
    parser.add_argument("--shrink", type=int, default=6, help="divides prompts and answers (default 6)")
    parser.add_argument("--requests", type=int, default=LIVE_REQUESTS, help="of a real arm (default %(default)s)")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of both (default: the cores)")
    parser.add_argument("--runs", type=int, default=1, help="alternations with transformers (default 1)")
    parser.add_argument("--paced", action="store_true", help="no real model: stored step times of one like it")
    parser.add_argument("--arms", nargs="+", choices=ARMS, metavar="ARM", help=f"only these: {', '.join(ARMS)}")
    args = parser.parse_args()
    path = resolve_model(args.model)
    work = workloads(args.requests, args.seed, args.shrink, path)
    only_paced = args.paced or args.quick
    real = None if only_paced else Real(args, path, work)
    if real is not None:
        real.run()
        if args.arms:
            return 0
    step_times = paced.SMOLLM2 if real is None else real.step_times("saturated continuous")
    seeds = [args.seed] if args.quick else [args.seed + i for i in range(5)]
    size = None if real is None else real.kept["static_size"]
    results = paced_seeds(work, seeds, QUICK_REQUESTS if args.quick else PACED_REQUESTS, size, step_times)
    return conclude(args, real, results)


def conclude(args: Namespace, real: Real | None, results: list[dict[str, dict[str, float]]]) -> int:
    """Prints the table, the notes and, last, the figure in one sentence."""
    figures_of_real = None if real is None else real.figures
    shown, passed = table(figures_of_real, results)
    console.print(shown)
    if real is not None:
        padded = real.kept["padded"]
        share = statistics.median(padded["static"]) / statistics.median(padded["transformers"])
        console.print(f"note: static yields {share:.2f} of transformers' padded generate (void below {VOID_BELOW})")
        twins = real.twins()
        faults = agreement(real.figures, twins)
        for fault in faults:
            console.print(f"note: {fault}")
        passed &= share >= VOID_BELOW and not faults
        real.kept |= {"paced": results, "twins": twins, "faults": faults, "passed": passed}
        real.save()
    elif args.json:
        args.json.write_text(
            json.dumps({"machine": machine.facts(), "paced": results, "passed": passed}, indent=1) + "\n"
        )
    if args.quick:
        console.print(f"note: --quick: paced only, {QUICK_REQUESTS} requests an arm and one seed; no real model")
    first = statistics.median(CLAIMS[0].ratio(known) for known in results)
    on_real = f"{CLAIMS[0].ratio(real.figures):.2f} times (real model) and " if real else ""
    console.print(
        f"continuous batching yields {on_real}{first:.2f} times (paced) static's output tokens/s at saturation; "
        f"{'all bars met' if passed else 'bars MISSED'}."
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
