"""Generate text in the terminal.

The prompt is the argument, or standard input where there is none. It goes through the model's chat
template unless --raw is given. The text goes to standard output as it is made, all else to standard
error.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from time import perf_counter

from headway.cli.engine_flags import MODEL_HELP, add_engine_arguments, engine_config
from headway.cli.errors import CommandError, UsageError, engine_errors
from headway.cli.values import natural, nonnegative, positive, share
from headway.core.request import SamplingParams
from headway.engine.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway generate`."""
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="(default: read from standard input)")
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--max-tokens", type=positive, default=512, metavar="N", help="(default %(default)s)")
    parser.add_argument("--temperature", type=nonnegative, default=0.7, metavar="T", help="0 is greedy (default 0.7)")
    parser.add_argument("--top-p", type=share, default=1.0, metavar="P", help="(default 1)")
    parser.add_argument("--top-k", type=natural, default=0, metavar="K", help="(default: all)")
    parser.add_argument("--seed", type=int, metavar="N", help="(default: drawn, and said at the end)")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there; may be repeated")
    parser.add_argument("--quiet", action="store_true", help="nothing but the text, not even on standard error")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Generate one answer."""
    if args.raw and args.system:
        raise UsageError("--system needs the chat template that --raw leaves out")
    prompt = _prompt(args.prompt)
    config = engine_config(args)
    with engine_errors():
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            stop=args.stop,
        )
        asyncio.run(_stream(args, config, prompt, params))
    return 0


def _prompt(argument: str | None) -> str:
    if argument is None and sys.stdin.isatty():
        raise UsageError("no prompt: give one as the argument or on standard input")
    prompt = sys.stdin.read() if argument is None else argument
    if not prompt.strip():
        raise CommandError("the prompt is empty")
    return prompt


async def _stream(args: argparse.Namespace, config: EngineConfig, prompt: str, params: SamplingParams) -> None:
    from rich.console import Console

    from headway.engine.api import Engine

    console = Console(stderr=True, quiet=args.quiet, highlight=False)
    with console.status("starting the engine") as status:
        engine = await Engine.start(config, report=lambda line: status.update(line))
    async with engine:
        if not args.raw:
            messages = [{"role": "system", "content": args.system}] if args.system else []
            messages.append({"role": "user", "content": prompt})
            prompt = engine.tokenizer.apply_chat_template(messages)
        start, first, tokens = perf_counter(), 0.0, 0
        async with engine.generate(prompt, params, add_special_tokens=args.raw) as stream:
            async for delta in stream:
                first = first or perf_counter()
                tokens = delta.completion_tokens
                sys.stdout.write(delta.text)
                sys.stdout.flush()
        end = perf_counter()
    sys.stdout.write("\n")
    speed = f", then {(tokens - 1) / (end - first):.1f} tokens/s" if tokens > 1 else ""
    console.print(
        f"{len(stream.prompt_token_ids)} prompt tokens, {tokens} output tokens: the first after "
        f"{first - start:.2f} s{speed}; seed {stream.seed}",
        style="dim",
    )
