"""Causal attention of a ragged mixed batch over the paged KV pool, with grouped query heads.

Rows are independent: prefill chunks are computed row by row, the few tokens of decoding rows together but without
arithmetic that reaches from one into another. Every sum over the context runs in tiles at absolute positions, one after
the other, in float32. So a token's answer hangs neither on who shares the step nor on how its prompt was cut into
chunks; on CPUs that holds to the bit, where BLAS adds up a tile in order.
"""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.kernels.decode_attention import Decode, make_decode
from headway.kernels.kv_cache import KVCache, Slots
from headway.kernels.prefill_attention import Prefill

Longs = npt.NDArray[np.int64]

PREFILL = 0
FEW_TOKENS = 4
"""A row of no more tokens than this is computed as a decoding row is: BLAS adds up so few rows in another order."""


class AttentionPlan:
    """All that the layers of one step share: where its tokens are stored, and who attends to what.

    starts, num_tokens int64 [n]; tables int64 [n, at least the blocks of the longest row]. Row i computes positions
    [starts[i], starts[i] + num_tokens[i]) of the sequence that lies in the blocks tables[i]. Tokens come row after row.
    Any order of rows is right; `batch_order` is the fast one.
    """

    def __init__(self, cache: KVCache, num_heads: int, starts: Longs, num_tokens: Longs, tables: Longs) -> None:
        ends = np.cumsum(num_tokens)
        rows = np.repeat(np.arange(len(starts)), num_tokens)
        positions = np.arange(len(rows)) - np.repeat(ends - num_tokens - starts, num_tokens)
        last_block = (starts + num_tokens - 1) // cache.block_size
        begun = np.flatnonzero(last_block * cache.block_size >= starts)
        self._cache = cache
        self._slots = Slots(
            blocks=torch.from_numpy(tables[rows, positions // cache.block_size]).to(cache.device),
            offsets=torch.from_numpy(positions % cache.block_size).to(cache.device),
            begun=torch.from_numpy(tables[begun, last_block[begun]]).to(cache.device),
        )
        self._parts: list[tuple[slice, Decode | Prefill]] = []
        for width, run in groupby(enumerate(_width_classes(starts, num_tokens)), key=lambda row: row[1]):
            members = [row for row, _ in run]
            if width == PREFILL:
                for i in members:
                    tokens = slice(int(ends[i] - num_tokens[i]), int(ends[i]))
                    self._parts.append((tokens, Prefill(cache, int(starts[i]), int(num_tokens[i]), tables[i])))
            else:
                first, last = members[0], members[-1]
                tokens = slice(int(ends[first] - num_tokens[first]), int(ends[last]))
                decode = make_decode(cache, num_heads, positions[tokens] + 1, tables[rows[tokens]])
                self._parts.append((tokens, decode))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, KV, D] -> [T, H, D] in q's dtype: stores k and v, then attends, scaled 1/sqrt(D)."""
        self._cache.write(layer, self._slots, k, v)
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        scaled = q.float() * (1.0 / math.sqrt(q.shape[-1]))
        if len(self._parts) == 1:
            return self._parts[0][1](scaled, keys, values).to(q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for tokens, part in self._parts:
            out[tokens] = part(scaled[tokens], keys, values)
        return out


def batch_order(starts: Longs, num_tokens: Longs) -> Longs:
    """A permutation of rows that puts together those which can be computed together."""
    return np.argsort(_width_classes(starts, num_tokens), kind="stable")


def _width_classes(starts: Longs, num_tokens: Longs) -> Longs:
    """PREFILL, or of a decoding row 1 up to 256 tokens of context, and 1 more for each time 4 as many.

    A class is computed at the width of its longest row, so it must not reach too far; but each class costs some calls.
    """
    context = np.maximum(starts + num_tokens, 256)
    widths = 1 + np.ceil(np.log2(context / 256) / 2).astype(np.int64)
    return np.where(num_tokens > FEW_TOKENS, PREFILL, widths)
