"""Prove on this machine that no answer depends on how it is served.

The same prompts go through the engine one at a time, then batched, in chunks, in every formation, out of the prefix
cache, preempted ...; each answer is compared token by token, and log probability by log probability to the bit. Exit
status 1 where an answer differs. Bits that differ under equal tokens are told: torch's arithmetic does not promise more
on every machine, the native kernels do.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from headway.cli.engine_flags import MODEL_HELP, add_engine_arguments, engine_config
from headway.cli.errors import engine_errors
from headway.cli.values import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway verify`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--quick", action="store_true", help="16 prompts, 8 in flight, answers of 24 tokens: under a minute"
    )
    parser.add_argument("--num-prompts", type=positive, default=200, metavar="N", help="(default %(default)s)")
    parser.add_argument("--in-flight", type=positive, default=32, metavar="N", help="together (default %(default)s)")
    parser.add_argument(
        "--output-len", type=positive, default=64, metavar="TOKENS", help="of each (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (default 0)")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the table. Returns 1 where an answer differs."""
    from rich.console import Console
    from rich.table import Table

    from headway.engine.resolve import resolve_model
    from headway.lab.verify import Traffic, verify
    from headway.models.config import load_config

    config = engine_config(args)
    if args.quick:
        args.num_prompts, args.in_flight, args.output_len = 16, 8, 24
    with engine_errors():
        vocab_size = load_config(resolve_model(config.model)).vocab_size
        traffic = Traffic.draw(args.num_prompts, args.output_len, args.in_flight, vocab_size, args.seed)
        report = asyncio.run(verify(config, traffic, lambda name: print(f"{name} ...", file=sys.stderr)))
    console = Console(highlight=False)
    table = Table(title="no answer depends on how it is served", title_justify="left", title_style="bold", box=None)
    for column in ("check", "", "prompts", "tokens", "mismatches", "bits", "first difference"):
        table.add_column(column, no_wrap=column != "first difference")
    for check in report.checks:
        word = "kept" if check.passed else "BROKEN"
        counts = (check.prompts, check.tokens, check.mismatches, check.bits)
        table.add_row(check.name, word, *(f"{count:,}" for count in counts), check.first)
    console.print(table)
    for line in report.backend:
        console.print(line, soft_wrap=True)
    exact = not any(check.bits or check.mismatches for check in report.checks)
    console.print(
        "guarantee seen: " + ("equal to the bit" if exact else "equal tokens at best; bits differ with company")
    )
    return int(not all(check.passed for check in report.checks))
