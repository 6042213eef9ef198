"""Load-test any OpenAI-compatible server.

A closed loop (--concurrency users, each of whom sends a request when the last one is answered) or
an open one (--rate, Poisson arrivals). Latencies count from when a request was due. Exit status 1
where any request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.errors import CommandError, UsageError
from headway.cli.values import natural, nonnegative, positive, rate

if TYPE_CHECKING:
    from headway.lab.load import LoadTest, Result
    from headway.lab.workload import Item

RANDOM_LENGTHS = (512, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway bench`."""
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", default="http://127.0.0.1:8000", help="(default %(default)s)", metavar="URL")
    group.add_argument("--model", help="(default: the first that the server lists)", metavar="NAME")
    group.add_argument("--api-key", help="sent as a bearer token", metavar="KEY")
    group.add_argument(
        "--endpoint", choices=["completions", "chat"], default="completions", help="(default %(default)s)"
    )
    group.add_argument("--timeout", type=rate, default=3600.0, metavar="SECONDS", help="of one request (default 1 h)")

    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset",
        default="sharegpt",
        metavar="NAME",
        help="sharegpt (default), random, or a JSON Lines file: prompt, prompt_token_ids or messages; output_len",
    )
    group.add_argument("--num-prompts", type=positive, metavar="N", help="(default 200; of a file: all)")
    group.add_argument(
        "--input-len", type=positive, metavar="TOKENS", help="random: of each prompt (default 512); sharegpt: at most"
    )
    group.add_argument(
        "--output-len", type=positive, metavar="TOKENS", help="random: of each answer (default 128); else at most"
    )
    group.add_argument(
        "--vocab-size", type=positive, metavar="N", help="random: draw ids below N (default: 1000-31999)"
    )
    group.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="sharegpt: whose tokens are counted; a folder or .gguf file (default: the embedded model)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="ask for exactly the wanted number of tokens")
    group.add_argument("--temperature", type=nonnegative, default=0.0, metavar="T", help="(default 0)")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals (default 0)")
    group.add_argument("--extra-body", type=_json_object, default={}, metavar="JSON", help="joins each request's body")

    group = parser.add_argument_group("load")
    group.add_argument("--concurrency", type=positive, metavar="N", help="requests at a time (default 1 if no --rate)")
    group.add_argument("--rate", type=rate, metavar="R", help="Poisson arrivals per second; inf: all at once")
    group.add_argument("--warmup", type=natural, default=0, metavar="N", help="requests sent before, not counted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, flags, figures and raw samples")


def run(args: argparse.Namespace) -> int:
    """Run the load test that `args` describe and print its table. Returns 0, or 1 where a request failed."""
    from rich.console import Console

    from headway.lab.load import LoadError
    from headway.lab.workload import WorkloadError

    console = Console(highlight=False)
    if args.json and not args.json.parent.is_dir():
        raise CommandError(f"--json: {args.json.parent} is not a folder")
    try:
        return asyncio.run(_run(args, console))
    except (LoadError, WorkloadError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.strerror}: {error.filename}" if error.filename else str(error)) from None


async def _run(args: argparse.Namespace, console: Any) -> int:
    from headway.lab import machine
    from headway.lab.load import LoadTest, Target, first_model
    from headway.lab.report import render, summarise, write_json

    model = args.model or await first_model(args.base_url, args.api_key)
    items = _workload(args, args.num_prompts, console)
    target = Target(
        args.base_url,
        model,
        endpoint=args.endpoint,
        api_key=args.api_key,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        extra=args.extra_body,
    )
    load = {"concurrency": args.concurrency, "rate": args.rate, "seed": args.seed, "timeout": args.timeout}
    measured, warmup = items[: len(items) - args.warmup], items[len(items) - args.warmup :]
    if warmup:
        await _watched(LoadTest(target, warmup, **load), console, "warm-up")
    results = await _watched(LoadTest(target, measured, **load), console, "requests")
    summary = summarise(results)
    console.print(render(summary, f"{model} at {args.base_url}: {_load_name(args)}, {_dataset_name(args)}"))
    if args.json:
        flags = {name: _plain(value) for name, value in vars(args).items() if name != "api_key"}
        write_json(args.json, summary, results, machine=machine.facts(), model=model, flags=flags)
    return 1 if summary.failed else 0


async def _watched(test: LoadTest, console: Any, name: str) -> list[Result]:
    """Run `test` below a progress bar (none where the output is no terminal)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tokens = failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=len(test.items))

        def watch(result: Result) -> None:
            nonlocal tokens, failed
            tokens += result.output_tokens
            failed += not result.ok
            trouble = f", {failed} failed" if failed else ""
            progress.update(task, advance=1, description=f"{name}: {tokens:,} tokens{trouble}")

        test.watch = watch
        return await test.run()


def _workload(args: argparse.Namespace, count: int | None, console: Any) -> list[Item]:
    """The items to measure, then those to warm up with, so that neither finds the other's prefixes cached."""
    from headway.lab import workload

    if args.dataset not in ("sharegpt", "random"):
        if args.input_len:
            raise UsageError("--input-len is for random and sharegpt; a file's prompts are as long as they are")
        return workload.from_file(
            Path(args.dataset), None if count is None else count + args.warmup, output_len=args.output_len
        )
    count = (count or 200) + args.warmup
    if args.dataset == "random":
        prompt_len, output_len = args.input_len or RANDOM_LENGTHS[0], args.output_len or RANDOM_LENGTHS[1]
        if args.endpoint == "chat":
            return workload.random_text(count, prompt_len=prompt_len, output_len=output_len, seed=args.seed)
        return workload.random_tokens(
            count, prompt_len=prompt_len, output_len=output_len, seed=args.seed, vocab_size=args.vocab_size
        )
    with console.status("reading ShareGPT"):
        return workload.sharegpt(
            count, _tokenizer(args.tokenizer), seed=args.seed, max_prompt=args.input_len, max_output=args.output_len
        )


def _tokenizer(name: str | None) -> Any:
    from headway.engine.resolve import resolve_model
    from headway.engine.text import Tokenizer

    return Tokenizer.load(resolve_model(name))


def _plain(value: Any) -> Any:
    """A flag's value as JSON can hold it."""
    return str(value) if isinstance(value, Path) or value == math.inf else value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _load_name(args: argparse.Namespace) -> str:
    if args.rate is None:
        return f"closed loop, concurrency {args.concurrency or 1}"
    limit = f", at most {args.concurrency} at a time" if args.concurrency else ""
    return f"open loop, {args.rate:g} requests/s{limit}"


def _dataset_name(args: argparse.Namespace) -> str:
    cap = f", at most {args.output_len} output tokens" if args.output_len and args.dataset != "random" else ""
    return f"{args.dataset}{cap}, seed {args.seed}"
