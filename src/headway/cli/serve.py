"""Serve a model over the OpenAI API.

With no MODEL the embedded one is served, SmolLM2-135M-Instruct. A first Ctrl-C lets requests in
flight end, a second one does not wait for them.
"""

from __future__ import annotations

import argparse
import sys

from headway.cli.engine_flags import MODEL_HELP, add_engine_arguments, engine_config
from headway.cli.errors import CommandError
from headway.cli.values import class_slo, memory_size, nonnegative, port_number, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway serve`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default %(default)s)")
    group.add_argument(
        "--port", type=port_number, default=8000, metavar="N", help="(default %(default)s; 0 takes one that is free)"
    )
    group.add_argument("--served-model-name", metavar="NAME", help="the model's name in the API (default: the file's)")
    group.add_argument("--max-waiting", type=positive, metavar="N", help="requests that may wait (default 4096)")
    group.add_argument(
        "--max-body-size", type=memory_size, default=2**24, metavar="SIZE", help="of a request (default 16MiB)"
    )
    group.add_argument(
        "--allowed-origin", action="append", metavar="ORIGIN", help="whose pages may read answers (default: any)"
    )
    group.add_argument(
        "--grace-seconds", type=nonnegative, default=10.0, metavar="S", help="for requests in flight when stopping"
    )
    group.add_argument("--api-keys", metavar="FILE", help="who may use it, as which tenant: see docs/api.md")
    group.add_argument(
        "--class-slo",
        action="append",
        type=class_slo,
        default=[],
        metavar="CLASS=ttft:MS,...",
        help="what a class is promised by default: ttft, tpot, deadline, max_queue",
    )
    group.add_argument("--event-log", metavar="FILE", help="write down all that drives the scheduler")
    group.add_argument("--quiet", action="store_true", help="no line a second about what the server does")
    group.add_argument(
        "--watchdog-seconds", type=positive, metavar="S", help="wait without any progress before it acts (default 10)"
    )
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    config = engine_config(args)
    from headway.server.keys import KeyFileError, Keyring
    from headway.server.run import serve
    from headway.server.settings import ServerSettings

    try:
        keys = Keyring.read(args.api_keys) if args.api_keys is not None else None
    except KeyFileError as error:
        raise CommandError(str(error)) from None
    weighted = keys is not None and any(tenant.weight != 1 for tenant in keys.tenants.values())
    if weighted and "fair" not in config.scheduler.policy:
        print(f"note: the weights in {args.api_keys} act under --policy fair only", file=sys.stderr)
    settings = ServerSettings(
        max_body_bytes=args.max_body_size,
        grace_seconds=args.grace_seconds,
        cors_origins=tuple(args.allowed_origin or "*"),
        status_line=not args.quiet,
        keys=keys,
        class_slo=dict(args.class_slo),
    )
    return serve(config, args.host, args.port, settings)
