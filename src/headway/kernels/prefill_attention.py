"""Attention of many tokens of one sequence: what a prefilling row needs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.kernels.decode_attention import TILE
from headway.kernels.kv_cache import KVCache

QUERY_TILE = 64
"""Query tokens whose scores are held at a time."""


class Prefill:
    """Positions [start, start + count) of the sequence in the blocks `table` int64 [*].

    Each layer's context is gathered once; then the queries pass over it, tile by tile.
    """

    def __init__(self, cache: KVCache, start: int, count: int, table: npt.NDArray[np.int64]) -> None:
        self._kv_heads, self._head_dim = cache.num_kv_heads, cache.head_dim
        num_blocks = -(-(start + count) // cache.block_size)
        heads = np.arange(cache.num_kv_heads)[:, None]
        per_head = table[None, :num_blocks] * cache.num_kv_heads + heads
        per_dim = per_head[:, None, :] * cache.head_dim + np.arange(cache.head_dim)[:, None]
        self._key_rows = torch.from_numpy(per_dim.reshape(-1)).to(cache.device)
        self._value_rows = torch.from_numpy(per_head.reshape(-1)).to(cache.device)
        bounds = np.linspace(0, count, -(-count // QUERY_TILE) + 1).astype(int).tolist()
        self._tiles = [_query_tile(cache, start, first, last) for first, last in pairwise(bounds)]

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """(scaled float32 queries [count, H, D], a layer's keys, its values) -> float32 [count, H, D]."""
        count, heads, dim = q.shape
        kv_heads, block_size = self._kv_heads, keys.shape[-1]
        group = heads // kv_heads
        k = keys.view(-1, block_size).index_select(0, self._key_rows).view(kv_heads, dim, -1).float()
        v = values.view(-1, block_size * dim).index_select(0, self._value_rows).view(kv_heads, -1, dim).float()
        q = q.view(count, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, count * group, dim)
        out = torch.zeros_like(q)
        for tile in self._tiles:
            rows = slice(tile.first * group, tile.last * group)
            scores = torch.bmm(q[:, rows], k[:, :, : tile.width])
            ahead = scores.view(kv_heads, tile.last - tile.first, group, tile.width)[..., tile.diagonal :]
            ahead.masked_fill_(tile.hidden, -math.inf)
            weights = torch.softmax(scores, dim=-1)
            for begin in range(0, tile.end, TILE):
                end = min(begin + TILE, tile.end)
                out[:, rows].baddbmm_(weights[..., begin:end], v[:, begin:end])
        return out.view(kv_heads, count, group, dim).transpose(0, 1).reshape(count, heads, dim)


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Queries [first, last) of the row: they see the context up to `end`; their scores are `width` wide.

    `hidden` bool [last - first, 1, width - diagonal]: of the positions from `diagonal` on, those a query must not see.
    """

    first: int
    last: int
    diagonal: int
    end: int
    width: int
    hidden: Tensor


def _query_tile(cache: KVCache, start: int, first: int, last: int) -> _QueryTile:
    diagonal, end = start + first, start + last
    width = -(-end // cache.block_size) * cache.block_size
    hidden = np.arange(diagonal, width) > np.arange(diagonal, end)[:, None]
    return _QueryTile(first, last, diagonal, end, width, torch.from_numpy(hidden[:, None]).to(cache.device))
