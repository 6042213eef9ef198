"""Counters: how much a scheduler has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the start; tokens and rows computed; steps; preemptions, of which swaps, and blocks copied for
    those, out and in; requests."""

    num_steps: int = 0
    num_batched_tokens: int = 0
    num_batched_rows: int = 0
    num_pad_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_swapped_blocks: int = 0
    num_recomputed_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_finished: int = 0
