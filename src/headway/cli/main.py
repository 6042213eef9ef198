"""The `headway` command: imports only the subcommand asked for; errors of use become one clear line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

import headway
from headway.cli.errors import CommandError, UsageError

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "generate": "generate text in the terminal",
    "info": "show the machine, the model and what fits in memory",
    "compare": "every batching strategy side by side on this machine",
    "verify": "prove here that no answer depends on how it is served",
    "bench": "load-test any OpenAI-compatible server",
    "verify-policy": "run a policy of your own against what every policy promises",
}


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS)) + 2
    lines = "\n".join(f"  {name:<{width}}{summary}" for name, summary in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="headway",
        usage="headway COMMAND [...]",
        description="An LLM serving engine whose heart is batching.",
        epilog=f"commands:\n{lines}\n\n`headway COMMAND --help` shows a command's flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"headway {headway.__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 where it failed, 2 where it was called wrongly."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        _overview().print_help()
        return 2
    if arguments[0] not in COMMANDS:
        _overview().parse_args(arguments[:1])
    name = arguments[0]
    module = import_module(f"headway.cli.{name.replace('-', '_')}")
    parser = argparse.ArgumentParser(
        prog=f"headway {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    try:
        return int(module.run(parser.parse_args(arguments[1:])))
    except UsageError as error:
        parser.error(str(error))
    except CommandError as error:
        print(f"headway {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `headway ... | head`
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
