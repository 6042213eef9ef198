"""Swapping: the host's memory as numbers, what is to be copied in a step, and how long copying takes."""

from __future__ import annotations

import numpy as np

from headway.core.batch import NO_IDS, Ints, Swaps

MEMORY = 0.98
"""What a block copied before counts for when another has been copied."""


class CopyTime:
    """Seconds that copying a KV block between device and host takes, learnt from the steps that did.

    0 before the first: the first victims are swapped out, and then it is known. Deterministic.
    """

    def __init__(self) -> None:
        self._blocks = 0.0
        self._seconds = 0.0

    def observe(self, blocks: int, seconds: float) -> None:
        """So many blocks, out and in, took so long together."""
        if blocks > 0 and seconds > 0:
            keep = MEMORY**blocks
            self._blocks = keep * self._blocks + blocks
            self._seconds = keep * self._seconds + seconds

    @property
    def per_block(self) -> float:
        return self._seconds / self._blocks if self._blocks else 0.0


class HostPool:
    """Blocks in the host's memory, ids 0 .. num_blocks - 1, and which rows' KV lies there.

    A row takes them when it is told to leave and gives them back when it returns or ends. Launched steps copy in the
    order in which they were put together, so what is given back while one is put together can be had in the next.
    free + held + returning == num_blocks at any time, `check` says.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._returning: list[int] = []
        self._held: dict[int, Ints] = {}
        self._out: dict[int, tuple[Ints, Ints]] = {}
        self._in: list[tuple[Ints, Ints]] = []

    @property
    def available(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        return 1.0 - self.available / self.num_blocks if self.num_blocks else 0.0

    @property
    def rows(self) -> set[int]:
        """Those that hold blocks here."""
        return set(self._held)

    def holds(self, row: int) -> bool:
        return row in self._held

    def reserve(self, row: int, count: int) -> bool:
        """Gives a row that will be swapped out `count` blocks; False, and nothing is given, where there are too few."""
        if count > len(self._free):
            return False
        self._held[row] = np.array([self._free.pop() for _ in range(count)], np.int32)
        return True

    def copy_out(self, row: int, device: Ints) -> None:
        """The next step copies the blocks `device` int32[k] into the first k of the row's, before it does anything."""
        self._out[row] = device, self._held[row][: len(device)]

    def copy_in(self, row: int, first: int, device: Ints) -> None:
        """The step copies the row's blocks from `first` on into `device` int32[k]; the row gives up all it has here."""
        ids = self._held.pop(row)
        self._in.append((device, ids[first : first + len(device)]))
        self._returning += ids.tolist()  # it may still have to be copied out before, in the same step

    def release(self, row: int) -> None:
        """A row needs what it has here no more."""
        ids = self._held.pop(row, None)
        if ids is not None:
            self._returning += ids.tolist()
            self._out.pop(row, None)

    def settle(self) -> None:
        """Another step is put together: what was given back before can be had again."""
        if self._returning:
            self._free += self._returning
            self._returning = []

    @property
    def copying(self) -> bool:
        """Whether the step that is put together must copy anything."""
        return bool(self._out or self._in)

    def copies(self) -> tuple[Swaps, tuple[int, ...]]:
        """What the step that is put together must copy, and the rows that it copies out."""
        out, rows = list(self._out.values()), tuple(self._out)
        swaps = Swaps(*_joined(out), *_joined(self._in))
        self._out, self._in = {}, []
        return swaps, rows

    def check(self) -> None:
        """Raises AssertionError where a block is lost or has two owners."""
        held = [block for ids in self._held.values() for block in ids.tolist()]
        everything = sorted([*self._free, *self._returning, *held])
        assert everything == list(range(self.num_blocks)), "a host block is lost or has two owners"


def _joined(pairs: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    if not pairs:
        return NO_IDS, NO_IDS
    first, second = zip(*pairs, strict=True)
    return np.concatenate(first), np.concatenate(second)
