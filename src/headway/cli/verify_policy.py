"""Run a policy, one of headway's or one of your own, against what every policy promises.

It orders random traffic in the real scheduler on a virtual clock: scores are finite, nothing but the order is touched,
two runs are the same, every request is served in every formation, and overtaking keeps within the bound claimed.
What its calls cost is reported. Exit status 1 where a promise is broken.
"""

from __future__ import annotations

import argparse
from functools import partial

from headway.cli.errors import UsageError
from headway.cli.values import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway verify-policy`."""
    parser.add_argument(
        "policy",
        metavar="POLICY",
        nargs="?",
        help="a name, aged:NAME, module:Class or file.py:Class; without: list them",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic (default 0)")
    parser.add_argument(
        "--max-overtaking", type=positive, default=2_000, metavar="TOKENS", help="of aged policies (default 2000)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the verdict as a table. Returns 1 where a promise is broken."""
    from rich.console import Console
    from rich.table import Table

    from headway.core import policies
    from headway.lab.conformance import verify

    console = Console(highlight=False)
    if args.policy is None:
        for name in policies.POLICIES:
            console.print(f"{name:<13} {policies.summary(name)}", soft_wrap=True)
        return 0
    make = partial(policies.make, args.policy, None, args.max_overtaking)
    try:
        make()
    except ValueError as error:
        raise UsageError(str(error)) from None
    checks = verify(make, args.seed)
    table = Table(title=f"policy {args.policy}", title_justify="left", title_style="bold", box=None)
    for column in ("check", "", "what was seen"):
        table.add_column(column)
    for check in checks:
        word = {True: "kept", False: "BROKEN", None: "reported"}[check.passed]
        table.add_row(check.name, word, check.detail)
    console.print(table)
    return int(any(check.passed is False for check in checks))
