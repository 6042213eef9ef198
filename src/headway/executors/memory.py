"""The arithmetic of the KV pool: how many blocks there are, and how long a sequence may get."""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import ModelError
from headway.executors.config import ExecutorConfig

CPU_POOL_LIMIT = 4 * 2**30
"""Bytes that a pool on a CPU takes at most where nobody says how many."""
CPU_SHARE = 0.5
"""... and of what is free it takes at most this much, since others live on the machine."""
SWAP_SPACE = 4 * 2**30
"""Bytes of the host's memory for KV that is swapped out, where nobody says how many."""
SWAP_SHARE = 0.25
"""... and at most this much of what is free there."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The pool's num_blocks of block_size tokens, what a token takes in all layers, and the longest sequence in tokens.

    model_limit: the longest that the model was made for.
    """

    num_blocks: int
    block_size: int
    bytes_per_token: int
    max_model_len: int
    model_limit: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        size = self.num_tokens * self.bytes_per_token
        text = (
            f"KV pool {gigabytes(size)}: {self.num_blocks:,} blocks of {self.block_size} tokens, {self.num_tokens:,} "
            f"tokens at {self.bytes_per_token:,} bytes; sequences up to {self.max_model_len:,} tokens"
        )
        if self.max_model_len == self.num_tokens < self.model_limit:
            text += f" (all that the pool holds: the model could do {self.model_limit:,})"
        return text


def kv_budget(config: ExecutorConfig, bytes_per_token: int, model_limit: int, pool_memory: int) -> KVBudget:
    """The pool that `pool_memory` bytes give, one block of which is nobody's, and no more than all slots could fill.

    model_limit: the longest sequence in tokens that the model was made for.

    Raises:
        ModelError: max_model_len is more than the model or the pool allows, or the pool holds no block at all.
    """
    block_size, wanted = config.block_size, config.max_model_len
    if block_size < 1:
        raise ModelError(f"block_size must be at least 1, got {block_size}")
    block_bytes = block_size * bytes_per_token
    fit = pool_memory // block_bytes - 1
    if fit < 1:
        raise ModelError(
            f"{gigabytes(pool_memory)} for the KV pool is too little: two blocks of {block_size} tokens take "
            f"{gigabytes(2 * block_bytes)}. Raise --kv-cache-memory or free some memory"
        )
    if wanted is not None and wanted < 1:
        raise ModelError(f"max_model_len must be at least 1, got {wanted}")
    if wanted is not None and wanted > model_limit:
        raise ModelError(f"max_model_len {wanted:,} is more than the {model_limit:,} tokens the model was made for")
    if wanted is not None and wanted > fit * block_size:
        needed = (-(-wanted // block_size) + 1) * block_bytes
        raise ModelError(
            f"max_model_len {wanted:,} is too much: a KV pool of {gigabytes(pool_memory)} holds {fit * block_size:,} "
            f"tokens. Lower --max-model-len, or raise --kv-cache-memory to {needed:,}"
        )
    max_model_len = min(wanted or model_limit, fit * block_size)
    useful = config.max_num_seqs * -(-max_model_len // block_size)
    return KVBudget(min(fit, useful), block_size, bytes_per_token, max_model_len, model_limit)


def host_blocks(config: ExecutorConfig, budget: KVBudget, free: int) -> int:
    """Blocks that fit into the host's memory for swapping; `free`: bytes that the host has free."""
    size = min(SWAP_SPACE, int(SWAP_SHARE * free)) if config.swap_space is None else config.swap_space
    return size // (budget.block_size * budget.bytes_per_token)


def gigabytes(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.3f} MB"
