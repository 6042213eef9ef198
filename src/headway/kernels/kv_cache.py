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


class HostCache:
    """Blocks of a KVCache in the host's memory: keys and values as they lie in the cache, ids 0 .. num_blocks - 1.

    Pages that were never written take no memory on CPUs; beside a GPU the memory is pinned, for faster copies.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._cache = cache
        pinned = cache.device.type == "cuda" and num_blocks > 0
        self._pairs = [
            (tensor, torch.empty(tensor.shape[0], num_blocks, *tensor.shape[2:], dtype=tensor.dtype, pin_memory=pinned))
            for tensor in (cache.keys, cache.values)
        ]

    def copy_out(self, device_blocks: Tensor, host_blocks: Tensor) -> None:
        """Block device_blocks[i] of the cache is copied into host_blocks[i]; int64 [n] on the CPU, and waited for."""
        for device, host in self._pairs:
            host.index_copy_(1, host_blocks, device.index_select(1, device_blocks.to(device.device)).cpu())

    def copy_in(self, device_blocks: Tensor, host_blocks: Tensor) -> None:
        """The other way round."""
        for device, host in self._pairs:
            blocks = host.index_select(1, host_blocks).to(device.device)
            device.index_copy_(1, device_blocks.to(device.device), blocks)


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """What the keys and values of one token take in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def kv_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """What keys and values are kept in for a model of `dtype`: on CPUs float32, in which attention computes there.

    Rounding scores or widening every key at every step would cost accuracy or more time than the smaller pool saves.
    """
    return torch.float32 if torch.device(device).type == "cpu" else dtype
