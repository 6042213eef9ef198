"""Reservation: what admission keeps free for the answers of those on board, so that few or none must leave."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from headway.core.batch import Bools, Ints
from headway.core.kv_cache import BlockPool, blocks_for
from headway.core.output_length import OutputLengthPredictor
from headway.core.table import Rows

WATERMARK = 0.01
"""The share of the blocks that admission leaves free."""


class Reservation(Protocol):
    """`fits` bool[n]: which of `joining` (the queue's best, in order) may join those on `board` beside each other, as
    far as their answers are concerned; that their prompts fit is checked elsewhere. `backfills`: whether rows may be
    let past one that does not fit, and leave when it does; `evicts`: whether rows on board leave for one that outranks
    them and lacks blocks. `headroom`: blocks that admission leaves free for `num_rows`
    on board to grow into.
    """

    backfills: bool
    evicts: bool

    def headroom(self, num_rows: int, num_blocks: int) -> int: ...

    def fits(self, board: Rows, joining: Rows, pool: BlockPool, predictor: OutputLengthPredictor) -> Bools: ...


class Optimistic:
    """Answers may grow into whatever is free then: the board is full, and rows leave when it is too full."""

    backfills = True
    evicts = True

    def headroom(self, num_rows: int, num_blocks: int) -> int:
        """A watermark, and the blocks that those on board will ask for while they generate half a block."""
        return math.ceil(WATERMARK * num_blocks) + num_rows // 2

    def fits(self, board: Rows, joining: Rows, pool: BlockPool, predictor: OutputLengthPredictor) -> Bools:
        return np.ones(len(joining), np.bool_)


class Full:
    """Room for prompt and max_tokens of everybody on board: nobody ever leaves for want of blocks."""

    backfills = False
    evicts = False

    def headroom(self, num_rows: int, num_blocks: int) -> int:
        return 0

    def fits(self, board: Rows, joining: Rows, pool: BlockPool, predictor: OutputLengthPredictor) -> Bools:
        # A last token's KV is not needed. What rows share counts for each: it may outlive who computed it.
        taken = int(blocks_for(board.limit - 1, pool.block_size).sum())
        together = taken + np.cumsum(blocks_for(joining.limit - 1, pool.block_size))
        result: Bools = together <= pool.num_blocks
        if len(result) and not len(board):
            result[0] = True  # alone it fits: it would have been refused otherwise
        return result


class Predicted:
    """Room for the most that those on board will hold together at any moment, if their answers end as predicted.

    Rows end at different times, and give back what they hold: the sum is looked at where each of them is expected to
    end. So "past-future" scheduling does it (Gong et al., ASPLOS 2025); here with a quantile of each answer's length,
    given how long it is already.
    """

    backfills = False
    evicts = True
    SHARE = 0.6

    def headroom(self, num_rows: int, num_blocks: int) -> int:
        return math.ceil(WATERMARK * num_blocks)

    def fits(self, board: Rows, joining: Rows, pool: BlockPool, predictor: OutputLengthPredictor) -> Bools:
        result = np.zeros(len(joining), np.bool_)
        held, remaining = _outlook(board, predictor)
        joining_held, joining_remaining = _outlook(joining, predictor)
        for i in range(len(joining)):
            held = np.append(held, joining_held[i])
            remaining = np.append(remaining, joining_remaining[i])
            if len(held) > 1 and peak_blocks(held, remaining, pool.block_size) > pool.num_blocks:
                break
            result[i] = True
        return result


def _outlook(rows: Rows, predictor: OutputLengthPredictor) -> tuple[Ints, Ints]:
    """Tokens of each, and tokens that it will still generate."""
    lengths = predictor.quantiles(rows, [Predicted.SHARE])[:, 0]
    remaining = np.ceil(lengths).astype(np.int32) - (rows.length - rows.prompt_len)
    return rows.length, np.maximum(remaining, 1)


def peak_blocks(held: Ints, remaining: Ints, block_size: int) -> float:
    """The most blocks that rows int32[n] of so many tokens will hold together, when each gains a token a step for
    `remaining` int32[n] steps and then gives all back. A last block is half full on average."""
    order = np.argsort(-remaining, kind="stable")
    rest = remaining[order].astype(np.int64)
    count = np.arange(1, len(rest) + 1)
    tokens = np.cumsum(held[order].astype(np.int64)) + count * rest
    return float((tokens / block_size + 0.5 * count).max(initial=0.0))
