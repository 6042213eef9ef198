"""Where the tokens of a batch lie in the one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.core.batch import Batch
from headway.kernels.attention import batch_order

Longs = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows in the order in which they are computed, and their tokens one after the other.

    starts, num_tokens int64 [n]; tables int64 [n, blocks]; slots, positions int64 [T], of each token. sampling int64
    [S]: where the last token lies of each row that samples, in the batch's order. A padding token is a row of its own
    at position 0 of the null block.
    """

    starts: Longs
    num_tokens: Longs
    tables: Longs
    slots: Longs
    positions: Longs
    sampling: Longs

    @staticmethod
    def of(batch: Batch, tables: Longs, block_size: int, null_block: int) -> Layout:
        """tables int64 [slots, blocks]: the block tables of all slots."""
        pads = int(batch.pad_tokens.sum())
        computed = batch.num_tokens > 0
        starts = np.concatenate([batch.starts[computed], np.zeros(pads, np.int64)])
        num_tokens = np.concatenate([batch.num_tokens[computed], np.ones(pads, np.int64)])
        slots = np.concatenate([batch.slots[computed], np.zeros(pads, np.int64)])
        num_blocks = -(-int((starts + num_tokens).max(initial=1)) // block_size)
        row_tables = tables[slots, :num_blocks]
        row_tables[len(slots) - pads :] = null_block

        order = batch_order(starts, num_tokens)
        starts, num_tokens, slots, row_tables = starts[order], num_tokens[order], slots[order], row_tables[order]
        ends = np.cumsum(num_tokens)
        last = np.empty_like(ends)
        last[order] = ends - 1
        positions = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - num_tokens - starts, num_tokens)
        sampling = last[: len(slots) - pads][batch.samples[computed]]
        return Layout(starts, num_tokens, row_tables, np.repeat(slots, num_tokens), positions, sampling)
