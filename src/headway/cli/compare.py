"""Compare every way of batching and every order of service on one workload.

Short chat mixed with long documents, Poisson arrivals near capacity, through Static(32), Dynamic(64),
Continuous, then chunked prefill, in-flight batching and priorities added one by one, then every other
policy: on a real model in this process, in real time, or paced (--paced): the same scheduler on a
virtual clock with step times measured from the embedded model, thousands of requests in a minute.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.engine_flags import MODEL_HELP
from headway.cli.errors import CommandError, UsageError
from headway.cli.values import memory_size, positive, rate, tenant_weight

if TYPE_CHECKING:
    from headway.lab.compare import Arm, Runner
    from headway.lab.traffic import Arrival

LIVE_REQUESTS, PACED_REQUESTS = 60, 2000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway compare`."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    group.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="(default %(default)s)")
    group.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: one a core)")
    group.add_argument("--kv-cache-memory", type=memory_size, metavar="SIZE", help="of the KV pool: 4G, 512MiB ...")
    group.add_argument("--paced", action="store_true", help="no model: a virtual clock and measured step times")

    group = parser.add_argument_group("workload")
    group.add_argument(
        "--requests", type=positive, metavar="N", help=f"(default {LIVE_REQUESTS}; paced {PACED_REQUESTS})"
    )
    group.add_argument("--load", type=rate, default=1.0, metavar="R", help="arrivals / capacity (default %(default)s)")
    group.add_argument("--rate", type=rate, metavar="R", help="arrivals per second, instead of --load")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of requests and arrivals (default 0)")

    group = parser.add_argument_group("arms")
    group.add_argument(
        "--only", nargs="+", metavar="NAME", help="static, dynamic, continuous, chunked, inflight, a policy ..."
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive, default=256, metavar="N", help="computed in a step (default 256)"
    )

    group.add_argument(
        "--tenant-weight", action="append", type=tenant_weight, metavar="NAME=W", help='of "big" or "small" under fair'
    )

    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE", help="write machine, flags, figures and raw samples")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts")


def run(args: argparse.Namespace) -> int:
    """Run all arms and print the table."""
    from rich.console import Console

    from headway.core.errors import ModelError
    from headway.lab import machine, traffic
    from headway.lab.compare import compare
    from headway.lab.compare_report import Comparison, render, write_html, write_json

    console = Console(highlight=False)
    chosen = _arms(args)
    _check_folders(args)
    requests = traffic.chat_and_documents(args.requests or (PACED_REQUESTS if args.paced else LIVE_REQUESTS), args.seed)
    try:
        runner = _runner(args, console)
    except ModelError as error:
        raise CommandError(str(error)) from None
    if not args.paced:
        requests = traffic.with_tokens(requests, args.seed)
    arrivals_per_second, capacity = _rate(args, runner, requests, console)
    arrivals = traffic.poisson(requests, arrivals_per_second, args.seed)
    with _Bars(console, len(arrivals)) as bars:
        outcomes = compare(runner, chosen, arrivals, lambda arm: bars.begin(arm.title))
    model = "Paced: SmolLM2-135M's step times" if args.paced else str(args.model or "SmolLM2-135M-Instruct")
    result = Comparison(outcomes, arrivals_per_second, capacity, args.seed, model, machine.facts())
    console.print(render(result))
    if args.json:
        flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        write_json(args.json, result, flags)
    if args.html:
        write_html(args.html, result)
        console.print(f"charts: {args.html}")
    return 0


def _arms(args: argparse.Namespace) -> list[Arm]:
    from headway.core.tenants import Tenant
    from headway.lab.compare import arms

    try:
        there_are = arms(args.max_num_batched_tokens)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if args.tenant_weight:
        tenants = {name: Tenant(weight) for name, weight in args.tenant_weight}
        there_are = [replace(arm, config=replace(arm.config, tenants=tenants)) for arm in there_are]
    if args.only is None:
        return there_are
    names = [arm.name for arm in there_are]
    if unknown := [name for name in args.only if name not in names]:
        raise UsageError(f"--only: there is no {', '.join(unknown)}; there are {', '.join(names)}")
    return [arm for arm in there_are if arm.name in args.only]


def _check_folders(args: argparse.Namespace) -> None:
    for flag, path in (("--json", args.json), ("--html", args.html)):
        if path and not path.parent.is_dir():
            raise CommandError(f"{flag}: {path.parent} is not a folder")


def _runner(args: argparse.Namespace, console: Any) -> Runner:
    from headway.lab.compare import Live, Paced

    if args.paced:
        return Paced()
    from headway.core.config import SchedulerConfig
    from headway.engine.config import EngineConfig
    from headway.engine.resolve import resolve_model

    limits = SchedulerConfig(max_batch_size=64, max_num_batched_tokens=max(64, args.max_num_batched_tokens))
    config = EngineConfig(
        model=args.model,
        dtype=args.dtype,
        threads=args.threads,
        kv_cache_memory=args.kv_cache_memory,
        max_model_len=2048,
        scheduler=limits,
    )
    return Live(config, str(resolve_model(args.model)), report=console.print)


def _rate(
    args: argparse.Namespace, runner: Runner, requests: list[Arrival], console: Any
) -> tuple[float, float | None]:
    """Arrivals per second, and the capacity that they are a share of, if it was measured."""
    from headway.lab.compare import arms

    if args.rate is not None:
        return args.rate, None
    config = next(arm.config for arm in arms(args.max_num_batched_tokens) if arm.name == "inflight")
    with _Bars(console, len(requests)) as bars:
        capacity = runner(config, requests, config.seqs, bars.begin("capacity")).request_rate(config.seqs)
    return args.load * capacity, capacity


class _Bars:
    """A progress bar for each run, on a terminal."""

    def __init__(self, console: Any, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._total = total

    def begin(self, title: str) -> Any:
        task = self._progress.add_task(title, total=self._total)
        return lambda ended: self._progress.update(task, completed=ended)

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()
