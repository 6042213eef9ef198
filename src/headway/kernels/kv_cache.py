"""The paged KV pool: fixed blocks of `block_size` tokens, per layer, for keys and for values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Where the tokens of a step are stored: blocks and offsets int64 [T].

    `begun` int64: blocks of which this step writes the first part. They are cleared, so that what is read beyond a
    sequence's end and weighs nothing is a number: 0 times NaN is NaN.
    """

    blocks: Tensor
    offsets: Tensor
    begun: Tensor


class KVCache:
    """Keys [layers, blocks, KV, D, block_size] and values [layers, blocks, KV, block_size, D].

    Keys lie transposed, so that the scores of a block's tokens are one weighted sum of D contiguous rows, as the
    weighted sum of its values is one of block_size rows. There is one block more than asked for, `null_block`: what
    nobody will read is written there.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_blocks + 1, num_kv_heads)
        self.keys = torch.empty(*shape, head_dim, block_size, dtype=dtype, device=device)
        self.values = torch.empty(*shape, block_size, head_dim, dtype=dtype, device=device)
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.null_block = num_blocks

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def write(self, layer: int, slots: Slots, k: Tensor, v: Tensor) -> None:
        """Stores k, v [T, KV, D] of the T tokens that `slots` places."""
        keys, values = self.keys[layer], self.values[layer]
        if len(slots.begun):
            keys.index_fill_(0, slots.begun, 0.0)
            values.index_fill_(0, slots.begun, 0.0)
        keys[slots.blocks, :, :, slots.offsets] = k.to(keys.dtype)
        values[slots.blocks, :, slots.offsets] = v.to(values.dtype)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What the keys and values of one token take in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def kv_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What keys and values are kept in for a model of `dtype`: on CPUs float32, in which attention computes there.

    Rounding scores or widening every key at every step would cost accuracy or more time than the smaller pool saves.
    """
    return torch.float32 if torch.device(device).type == "cpu" else dtype
