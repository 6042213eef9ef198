"""Output tokens per second of the engine on the native kernels and on torch: so many requests of 512 tokens at a time.

In process (`LLM`), greedy, answers of 128 tokens, prompts of random token ids, nothing known beforehand. Time runs
from the call to the last token, prefill included. Each arm is a process of its own; they compute in turns.
"""

from __future__ import annotations

import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
from rich.table import Table

from common import Verdict, arguments, measured, spread

ARMS = {
    "native bfloat16": {"kernels": "native"},
    "torch bfloat16": {"kernels": "torch"},
    "native int8": {"kernels": "native", "quantization": "int8"},
}
WORTH = 1.0


def serve(pipe: Connection, settings: dict) -> None:
    """An engine in a process of its own: prompts come in, seconds go out."""
    from headway import LLM, SamplingParams

    lines: list[str] = []
    with LLM("smollm2", kv_cache_memory=2 * 10**9, prefix_caching=False, report=lines.append, **settings) as llm:
        pipe.send(lines[0])
        while (asked := pipe.recv()) is not None:
            prompts, length = asked
            params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            pipe.send(time.perf_counter() - start)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, help="of each engine (default: one a core)")
    args = parser.parse_args()
    counts, prompt, length, rounds = ((1, 8), 128, 16, 1) if args.quick else ((1, 8, 32, 64), 512, 128, 3)
    draw = np.random.default_rng(args.seed)
    context, pipes, children, notes = get_context("spawn"), {}, [], []
    for name, settings in ARMS.items():
        pipes[name], theirs = context.Pipe()
        children.append(context.Process(target=serve, args=(theirs, settings | {"threads": args.threads}), daemon=True))
        children[-1].start()
        notes.append(f"{name}: {pipes[name].recv()}")
    table = Table("at a time", *ARMS, "native / torch", title="output tokens per second, median (least-most)")
    samples: dict = {}
    ratios = []
    with measured() as whole:
        for count in counts:
            speeds: dict[str, list[float]] = {name: [] for name in ARMS}
            for _ in range(rounds):
                prompts = draw.integers(0, 40_000, (count, prompt)).tolist()
                for name, pipe in pipes.items():
                    pipe.send((prompts, length))
                    speeds[name].append(count * length / pipe.recv())
            ratios.append(median(speeds["native bfloat16"]) / median(speeds["torch bfloat16"]))
            table.add_row(str(count), *(spread(values) for values in speeds.values()), f"{ratios[-1]:.2f}")
            samples[str(count)] = speeds
    for pipe, child in zip(pipes.values(), children, strict=True):
        pipe.send(None)
        child.join()
    if args.quick:
        notes.append(f"--quick leaves out 32 and 64 at a time; prompts of {prompt} tokens, answers of {length}")
    sentence = f"bfloat16 on the native kernels is {min(ratios):.2f} to {max(ratios):.2f} x as fast as on torch"
    return Verdict(table, sentence, min(ratios) >= WORTH, samples, notes, whole.others).conclude(args)


if __name__ == "__main__":
    sys.exit(main())
