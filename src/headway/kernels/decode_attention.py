"""Attention of single tokens, each over the whole context of its own sequence: what decoding rows need.

Two bodies with the same answer. `GatherDecode`, in plain tensor operations, is the reference and runs on every device.
`BagDecode` is for CPUs: it reads the pool where it lies, through `embedding_bag`, a weighted sum of listed rows. The
scores of a block are such a sum (a query's elements weigh the rows of the transposed keys), and so is what the values
yield. Nothing is copied, and there is one accumulator per result, walked in order: a query's answer is its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from headway.kernels.kv_cache import KVCache

Longs = npt.NDArray[np.int64]

TILE = 128
"""Context tokens whose values are summed before they are added to the rest. No larger than what BLAS sums at once."""

GATHERED = 16_384
"""Tokens of context, padding included, that are copied out of the pool at a time."""

Decode = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scaled float32 queries [Q, H, D], a layer's keys, its values) -> float32 [Q, H, D]."""


def make_decode(cache: KVCache, num_heads: int, lengths: Longs, tables: Longs) -> Decode:
    """The body for this pool. Query i sees the first lengths[i] tokens of the sequence in the blocks tables[i].

    lengths int64 [Q]; tables int64 [Q, at least the blocks of the longest].
    """
    if cache.device.type == "cpu" and cache.keys.dtype == torch.float32:
        return BagDecode(cache, num_heads, lengths, tables)
    return GatherDecode(cache, lengths, tables)


class GatherDecode:
    """Copies the context out of the pool, padded to the longest, for as many queries at a time as GATHERED allows."""

    def __init__(self, cache: KVCache, lengths: Longs, block_tables: Longs) -> None:
        self._kv_heads = cache.num_kv_heads
        num_blocks = -(-int(lengths.max()) // cache.block_size)
        width = num_blocks * cache.block_size
        beyond = torch.from_numpy(np.arange(width) >= lengths[:, None]).to(cache.device)
        tables = torch.from_numpy(np.ascontiguousarray(block_tables[:, :num_blocks])).to(cache.device)
        self._at_a_time = max(1, GATHERED // width)
        self._parts = list(zip(tables.split(self._at_a_time), beyond.split(self._at_a_time), strict=True))

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        parts = zip(q.split(self._at_a_time), self._parts, strict=True)
        return torch.cat([self._decode(some, keys, values, *part) for some, part in parts])

    def _decode(self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, beyond: Tensor) -> Tensor:
        count, heads, dim = q.shape
        k = keys[tables].permute(0, 2, 3, 1, 4).reshape(count, self._kv_heads, dim, -1).float()
        v = values[tables].transpose(1, 2).reshape(count, self._kv_heads, -1, dim).float()
        v.masked_fill_(beyond[:, None, :, None], 0.0)  # whose blocks those are beyond a query's own, nobody knows
        scores = q.reshape(count, self._kv_heads, -1, dim) @ k
        scores.masked_fill_(beyond[:, None, None], -math.inf)
        return (torch.softmax(scores, dim=-1) @ v).reshape(count, heads, dim)


class BagDecode:
    """Reads the pool in place. The lists of rows are made once and serve all layers.

    Bags lie densely, [query, head, block] for scores and [query, head, tile] for values; those beyond a query's context
    are empty.
    """

    def __init__(self, cache: KVCache, num_heads: int, lengths: Longs, tables: Longs) -> None:
        count, block_size, dim = len(lengths), cache.block_size, cache.head_dim
        num_blocks = -(-int(lengths.max()) // block_size)
        self._block_size = block_size
        self._num_tiles = -(-num_blocks * block_size // TILE)
        heads = np.arange(num_heads)[:, None] // (num_heads // cache.num_kv_heads)
        head_blocks = (tables[:, None, :num_blocks] * cache.num_kv_heads + heads).astype(np.int32)

        held = -(-lengths // block_size)
        bags = np.broadcast_to(np.arange(num_blocks) < held[:, None, None], head_blocks.shape)
        self._bag_query = torch.from_numpy(np.repeat(np.arange(count * num_heads), np.repeat(held, num_heads)))
        self._key_rows = _rows_of(head_blocks[bags], dim)
        self._key_offsets = _offsets(bags * dim)
        beyond = np.arange(num_blocks * block_size) >= lengths[:, None, None]
        self._bias = torch.from_numpy(np.where(beyond, np.float32(-math.inf), np.float32(0.0)))

        # Values are summed over whole blocks: what lies beyond a query's context weighs nothing.
        self._bags = torch.from_numpy(np.flatnonzero(bags))
        self._value_rows = _rows_of(head_blocks[bags], block_size)
        tiles = np.clip(held[:, None] * block_size - np.arange(self._num_tiles) * TILE, 0, TILE)
        self._value_offsets = _offsets(np.repeat(tiles, num_heads, axis=0))
        self._tile_rows = torch.arange(count * num_heads * self._num_tiles).view(-1, self._num_tiles)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        count, heads, dim = q.shape
        elements = q.reshape(-1, dim).index_select(0, self._bag_query).view(-1)
        scores = _weighted_sums(self._key_rows, self._key_offsets, keys.view(-1, self._block_size), elements)
        scores = scores.view(count, heads, -1).add_(self._bias)
        weights = torch.softmax(scores, dim=-1).view(-1, self._block_size).index_select(0, self._bags).view(-1)
        sums = _weighted_sums(self._value_rows, self._value_offsets, values.view(-1, dim), weights)
        if self._num_tiles > 1:
            sums = functional.embedding_bag(self._tile_rows, sums, mode="sum")
        return sums.view(count, heads, dim)


def _weighted_sums(rows: Tensor, offsets: Tensor, table: Tensor, weights: Tensor) -> Tensor:
    """[bags, width]: for each bag the sum of weight times table row, in the order listed."""
    return functional.embedding_bag(rows, table, offsets, mode="sum", per_sample_weights=weights)


def _rows_of(groups: npt.NDArray[np.int32], size: int) -> Tensor:
    """int32 [n * size]: the rows of each of n groups, where groups of `size` rows lie one after the other."""
    return (torch.from_numpy(groups).view(-1, 1) * size + torch.arange(size, dtype=torch.int32)).view(-1)


def _offsets(sizes: npt.NDArray[np.int64]) -> Tensor:
    """int32 [n]: where each bag begins in the list."""
    ends = np.cumsum(sizes.reshape(-1))
    return torch.from_numpy((ends - sizes.reshape(-1)).astype(np.int32))
