"""headway against transformers' own padded `generate`: the same ShareGPT requests, weights, dtype and machine.

Both get 32 requests with output lengths as in the data set, greedy, eos ignored, prompts as token ids; only wanted
tokens count. transformers gets them as one left-padded batch, which lasts until its longest answer is done. headway
gets them twice: all at once until the last is done, and as a running engine does, 32 at a time with the next taken
on board as one leaves (the 32 requests three times over, ramp and drain included). The runs alternate.

Bar: a running engine yields at least 5 times as many wanted tokens per second.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from common import Verdict, arguments, console, measured, spread
from headway import Engine, SamplingParams
from headway.core.config import SchedulerConfig
from headway.engine.config import EngineConfig
from headway.engine.resolve import resolve_model
from headway.engine.text import Tokenizer
from headway.executors.machine import available_cores
from headway.lab.workload import sharegpt

BAR = 5.0
CONCURRENCY = 32
ROUNDS, QUICK_ROUNDS = 3, 2
"""How often the running engine gets the requests, so that most of its time is at full concurrency."""
QUICK_PROMPT, QUICK_SHRINK = 448, 16


@dataclass(frozen=True, slots=True)
class Work:
    """A prompt and the number of tokens wanted of its answer."""

    token_ids: list[int]
    output_len: int


def workload(path: Path, seed: int, quick: bool) -> list[Work]:
    """32 ShareGPT requests; for --quick without the longest prompts, and with all answers shortened alike."""
    tokenizer = Tokenizer.load(path)
    items = sharegpt(CONCURRENCY, tokenizer, seed=seed, max_prompt=QUICK_PROMPT if quick else None)
    if quick:
        items = [replace(item, output_len=-(-item.output_len // QUICK_SHRINK)) for item in items]
    return [Work(tokenizer.encode(str(item.prompt), add_special_tokens=False), item.output_len) for item in items]


class Transformers:
    """The model as transformers loads and runs it, in this process."""

    def __init__(self, path: Path, dtype: str, threads: int) -> None:
        os.environ["TQDM_DISABLE"] = "1"
        import torch
        from transformers import AutoModelForCausalLM, GgufConfig

        torch.set_num_threads(threads)
        packed = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
        source = packed if path.is_file() else {}
        folder = path.parent if path.is_file() else path
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **source)
        self.model.generation_config.eos_token_id = None

    def generate(self, work: list[Work]) -> None:
        """One left-padded batch, as long as its longest answer."""
        import torch

        width = max(len(one.token_ids) for one in work)
        ids = torch.zeros((len(work), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, one in enumerate(work):
            ids[row, width - len(one.token_ids) :] = torch.tensor(one.token_ids)
            mask[row, width - len(one.token_ids) :] = 1
        steps = max(one.output_len for one in work)
        with torch.inference_mode():
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, pad_token_id=0)
        if out.shape[1] != width + steps:
            raise RuntimeError(f"transformers made {out.shape[1] - width} tokens instead of {steps}")


async def serve(engine: Engine, work: list[Work]) -> None:
    """The requests through a running engine, CONCURRENCY at a time."""
    queue = iter(work)

    async def user() -> None:
        for one in queue:
            params = SamplingParams(max_tokens=one.output_len, temperature=0.0, ignore_eos=True)
            (answer,) = await engine.generate(one.token_ids, params).collect()
            if answer.completion_tokens != one.output_len:
                raise RuntimeError(f"headway made {answer.completion_tokens} tokens instead of {one.output_len}")

    await asyncio.gather(*(user() for _ in range(CONCURRENCY)))


def fastest_dtype(threads: int) -> str:
    """What transformers is faster in here, by its linear layers at a full batch: not every CPU gains by bfloat16."""
    # On a thread that ends: a team of OpenMP threads that stays behind would put an engine's in this process to sleep.
    with ThreadPoolExecutor(1) as thread:
        times = {name: thread.submit(_linear_seconds, name, threads).result() for name in ("float32", "bfloat16")}
    return min(times, key=times.__getitem__)


def _linear_seconds(name: str, threads: int) -> float:
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)
    dtype = getattr(torch, name)
    x, layers = torch.ones(CONCURRENCY, 1024, dtype=dtype), torch.ones(16, 1024, 1024, dtype=dtype)
    seconds = math.inf
    for _ in range(5):
        began = time.perf_counter()
        for weight in layers:
            functional.linear(x, weight)
        seconds = min(seconds, time.perf_counter() - began)
    return seconds


async def compare(args: Namespace, path: Path, work: list[Work], dtype: str) -> tuple[dict[str, list[float]], float]:
    """Wanted tokens per second of each arm, run by run, and the most cores that others used meanwhile."""
    theirs = Transformers(path, dtype, args.threads)
    # No prefix caching: the requests come more than once, and transformers computes every prompt.
    limits = SchedulerConfig(max_batch_size=CONCURRENCY, prefix_caching=False)
    config = EngineConfig(model=args.model, dtype=dtype, threads=args.threads, scheduler=limits)
    wanted = sum(one.output_len for one in work)
    rounds = {"once": 1, "running": ROUNDS} if not args.quick else {"running": QUICK_ROUNDS}
    rates: dict[str, list[float]] = {arm: [] for arm in ("transformers", *rounds)}
    others = 0.0
    async with await Engine.start(config) as engine:
        short = [Work(one.token_ids[:16], 4) for one in work]
        theirs.generate(short)
        await serve(engine, short)
        for run in range(args.runs):
            with console.status(f"run {run + 1} of {args.runs}"):
                with measured() as padded:
                    theirs.generate(work)
                rates["transformers"].append(wanted / padded.seconds)
                others = max(others, padded.others)
                console.print(f"run {run + 1}: transformers {rates['transformers'][-1]:.1f} tok/s")
                for arm, times in rounds.items():
                    with measured() as own:
                        await serve(engine, work * times)
                    rates[arm].append(wanted * times / own.seconds)
                    others = max(others, own.others)
                    console.print(f"run {run + 1}: headway {arm} {rates[arm][-1]:.1f} tok/s")
    return rates, others


def verdict(args: Namespace, rates: dict[str, list[float]], work: list[Work], dtype: str, others: float) -> Verdict:
    """The table and the figure."""
    ratios = {
        arm: [own / padded for own, padded in zip(values, rates["transformers"], strict=True)]
        for arm, values in rates.items()
    }
    table = Table(
        title=f"32 ShareGPT requests, {dtype}, threads: {args.threads}; median (min-max)", title_justify="left"
    )
    for heading in ("", "wanted tokens/s", "ratio"):
        table.add_column(heading, justify="right" if heading else "left")
    names = {
        "transformers": "transformers generate, one padded batch",
        "once": "headway, the same 32 at once, to the last",
        "running": f"headway, running at concurrency {CONCURRENCY}",
    }
    for arm in rates:
        table.add_row(names[arm], spread(rates[arm]), spread(ratios[arm], 2))
    ratio = statistics.median(ratios["running"])
    passed = ratio >= BAR
    prompts, wanted = sum(len(one.token_ids) for one in work), sum(one.output_len for one in work)
    notes = [f"{prompts:,} prompt tokens, {wanted:,} wanted; prefill is included in every time; prompts as token ids"]
    if args.quick:
        notes.append(
            f"--quick: one run, prompts of at most {QUICK_PROMPT} tokens, answers a {QUICK_SHRINK}th of their length, "
            "32 requests at once to the last left out"
        )
    sentence = (
        f"headway at concurrency {CONCURRENCY} yields {ratio:.1f} times the wanted output tokens per second of "
        f"transformers' padded generate ({dtype}); the bar is {BAR:g}: {'met' if passed else 'MISSED'}."
    )
    samples: dict[str, Any] = {
        "tokens_per_second": rates,
        "prompt_lens": [len(one.token_ids) for one in work],
        "output_lens": [one.output_len for one in work],
        "dtype": dtype,
    }
    return Verdict(table, sentence, passed, samples, notes, others)


def main() -> int:
    """Run the comparison; returns 1 where the bar is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="folder or .gguf file (default: the embedded model)")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="of both (default: what transformers is faster in)"
    )
    parser.add_argument("--threads", type=int, default=available_cores(), help="of both (default: the cores)")
    parser.add_argument("--runs", type=int, help="alternations (default 3, with --quick 1)")
    args = parser.parse_args()
    args.runs = args.runs or (1 if args.quick else 3)
    dtype = args.dtype or fastest_dtype(args.threads)
    path = resolve_model(args.model)
    work = workload(path, args.seed, args.quick)
    rates, others = asyncio.run(compare(args, path, work, dtype))
    return verdict(args, rates, work, dtype, others).conclude(args)


if __name__ == "__main__":
    sys.exit(main())
