"""Real lengths, in tokens: ShareGPT's prompts and answers, and the requests of a trace that is read by its path."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

from headway.engine.resolve import resolve_model
from headway.engine.text import Tokenizer
from headway.lab.workload import sharegpt

Lengths = list[tuple[int, int]]
"""(prompt, answer) of each request, in tokens."""


@cache
def sharegpt_lengths(count: int, seed: int) -> Lengths:
    """Of `count` first turns that pass the usual filter."""
    items = sharegpt(count, Tokenizer.load(resolve_model(None)), seed=seed)
    return [(item.prompt_len or 1, item.output_len) for item in items]


def trace_lengths(path: Path) -> Lengths:
    """All requests of an Azure LLM inference trace, in their order.

    Raises:
        OSError: it cannot be read.
        KeyError: it has no columns ContextTokens and GeneratedTokens.
    """
    with path.open(newline="") as lines:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]
