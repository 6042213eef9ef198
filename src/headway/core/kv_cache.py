"""BlockPool: the paged KV memory as numbers. Who holds which block, and what is free."""

from __future__ import annotations

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.prefix import PrefixIndex

BlockEntries = tuple[Ints, Ints, Ints]
"""(slots, index, ids) int32[m] each: block tables' new entries, table[slot][index] = id."""
NO_ENTRIES: BlockEntries = (np.zeros(0, np.int32),) * 3


def join_entries(parts: list[BlockEntries]) -> BlockEntries:
    """One set of entries of several, in order."""
    filled = [part for part in parts if len(part[0])]
    if len(filled) <= 1:
        return filled[0] if filled else NO_ENTRIES
    slots, index, ids = zip(*filled, strict=True)
    return np.concatenate(slots), np.concatenate(index), np.concatenate(ids)


def blocks_for(tokens: Ints, block_size: int) -> Ints:
    """Blocks that hold so many tokens (int32[n] -> int32[n])."""
    result: Ints = (tokens + (block_size - 1)) // block_size
    return result


class BlockPool:
    """Fixed blocks with reference counts, and a block table per executor slot.

    Blocks are 0 .. num_blocks - 1; free + held + cached == num_blocks at any time, `check` says; cached are those that
    nobody holds but `prefixes` remembers. The scheduler gives a slot's blocks back only when no launched step touches
    them any more.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        max_model_len: int,
        prefixes: PrefixIndex | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a block pool needs blocks: num_blocks={num_blocks}, block_size={block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tables = np.full((num_slots, -(-max_model_len // block_size)), -1, np.int32)
        self.held = np.zeros(num_slots, np.int32)
        self.refs = np.zeros(num_blocks, np.int32)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self.prefixes = prefixes
        self.num_forgotten = 0

    @property
    def available(self) -> int:
        """Blocks that can be had now, some of them by forgetting what they hold."""
        return self._num_free + self.num_cached

    @property
    def num_cached(self) -> int:
        return 0 if self.prefixes is None else self.prefixes.num_idle

    @property
    def usage(self) -> float:
        return 1.0 - self.available / self.num_blocks

    def extend(self, slots: Longs, counts: Ints) -> BlockEntries:
        """Gives slots[i] counts[i] more blocks; slots int64[n] are distinct, counts int32[n] positive.

        Raises:
            ValueError: more than `available`; nothing is given then.
        """
        total = int(counts.sum())
        if total > self.available:
            raise ValueError(f"asked for {total} blocks, only {self.available} are free")
        first = self.held[slots]
        owner, index = slots, first
        if total > len(slots):
            owner = np.repeat(slots, counts)
            within = np.arange(total, dtype=np.int32) - np.repeat(np.cumsum(counts, dtype=np.int32) - counts, counts)
            index = np.repeat(first, counts) + within
        ids = self._draw(total)
        self.tables[owner, index] = ids
        self.held[slots] = first + counts
        return owner.astype(np.int32), index, ids

    def grow(self, slots: Longs) -> BlockEntries:
        """Gives each of slots int64[n], which are distinct, one more block; so many must be `available`."""
        index = self.held[slots]
        ids = self._draw(len(slots))
        self.tables[slots, index] = ids
        self.held[slots] = index + 1
        return slots.astype(np.int32), index, ids

    def _draw(self, count: int) -> Ints:
        """Ids of blocks that have one holder from now on; what some of them held is forgotten."""
        while self._num_free < count:
            assert self.prefixes is not None, "the caller has seen that there are enough"
            self._free[self._num_free] = self.prefixes.forget()
            self._num_free += 1
            self.num_forgotten += 1
        ids: Ints = self._free[self._num_free - count : self._num_free][::-1].copy()
        self._num_free -= count
        self.refs[ids] = 1
        return ids

    def share(self, slot: int, ids: Ints) -> BlockEntries:
        """Gives an empty slot the blocks `ids` int32[m], which others may hold too."""
        assert self.prefixes is not None
        for block in ids[self.refs[ids] == 0].tolist():
            self.prefixes.wake(block)
        self.refs[ids] += 1
        self.tables[slot, : len(ids)] = ids
        self.held[slot] = len(ids)
        return np.full(len(ids), slot, np.int32), np.arange(len(ids), dtype=np.int32), ids

    def release(self, slot: int) -> None:
        """Takes every block of a slot back. What the prefix index knows of rests there, the last block first to go."""
        count = self.held[slot]
        ids = self.tables[slot, :count].copy()
        self.tables[slot, :count] = -1
        self.held[slot] = 0
        self.refs[ids] -= 1
        free = ids[self.refs[ids] == 0]
        if self.prefixes is not None:
            known = np.array([block in self.prefixes for block in free.tolist()], np.bool_)
            for block in free[known][::-1].tolist():
                self.prefixes.rest(block)
            free = free[~known]
        self._free[self._num_free : self._num_free + len(free)] = free[::-1]
        self._num_free += len(free)

    def check(self) -> None:
        """Raises AssertionError where a block is lost, free twice, or counted wrongly. For tests and the watchdog."""
        held = np.concatenate([self.tables[slot, :count] for slot, count in enumerate(self.held)])
        refs = np.bincount(held, minlength=self.num_blocks)
        assert (refs == self.refs).all(), f"reference counts are wrong for blocks {np.flatnonzero(refs != self.refs)}"
        free = self._free[: self._num_free]
        cached = np.array(list(self.prefixes.idle) if self.prefixes else [], np.int64)
        idle = np.concatenate([free, cached])
        assert len(np.unique(idle)) == len(idle), "a block is free twice"
        assert not refs[idle].any(), "a block is both free and held"
        assert len(idle) + np.count_nonzero(refs) == self.num_blocks, "a block is lost"
