"""Board: who holds an executor slot, and the tokens that are known of each."""

from __future__ import annotations

import numpy as np

from headway.core.batch import NO_IDS, Admission, Ints, Longs
from headway.core.kv_cache import NO_ENTRIES, BlockEntries, BlockPool, blocks_for
from headway.core.prefix import PrefixIndex
from headway.core.swap import HostPool
from headway.core.table import ENDED, LEAVING, RUNNING, Phase, RequestTable, RowSet


class Board:
    """Slots 0 .. num_slots - 1: one for each place on board, and some for rows that have lost theirs but are still in a
    launched step, so that nobody waits for that step. A row that leaves to come back takes its tokens along.

    `running`: the rows that may be computed. `lingering`: rows of a padded group that have ended but keep their places
    until all of it has. `leaving_blocks`: blocks held by rows that have ended or lost their place,
    and that come back when the launched steps which touch them have been collected.
    """

    def __init__(
        self,
        table: RequestTable,
        pool: BlockPool,
        num_slots: int,
        max_model_len: int,
        host: HostPool | None = None,
        spare_slots: int = 0,
    ) -> None:
        self.places = num_slots
        num_slots += spare_slots
        self.running = RowSet(num_slots)
        self.lingering = RowSet(num_slots)
        self.leaving_blocks = 0
        self.num_slots = num_slots
        self._table = table
        self.pool = pool
        self.host = host or HostPool(0)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._width = np.int64(max_model_len + 1)
        self._tokens = np.zeros((num_slots, max_model_len + 1), np.int32)
        self._flat = self._tokens.reshape(-1)
        self._saved: dict[int, Ints] = {}
        self._keys: dict[int, list[bytes]] = {}
        self._found: dict[int, Ints] = {}

    @property
    def num_free(self) -> int:
        """How many may join: slots that are free, as far as no more are on board than there are places."""
        return min(len(self._free_slots), self.vacant)

    @property
    def vacant(self) -> int:
        """Places that nobody has. The slot of who has just lost one may still be in a launched step."""
        return self.places - len(self.running) - len(self.lingering)

    @property
    def fragmentation(self) -> float:
        """Of the tokens that the blocks of those on board have room for, the share that is empty."""
        rows = self.running.rows
        room = int(self._table.blocks[rows].sum()) * self.pool.block_size
        return 1.0 - int(self._table.computed[rows].sum()) / room if room else 0.0

    def take(self, row: int) -> BlockEntries:
        """Gives a row of the queue a slot, and the blocks that the prefix index holds of it."""
        table = self._table
        slot = self._free_slots.pop()
        table.slot[row] = slot
        table.phase[row] = RUNNING
        tokens = self._known(row)
        self._saved.pop(row, None)
        self._tokens[slot, : len(tokens)] = tokens
        self.running.add(row)
        return self._take_found(row, slot)

    def _known(self, row: int) -> Ints:
        """The tokens of a row in the queue."""
        saved = self._saved.get(row)
        return np.array(self._table.request(row).prompt_token_ids, np.int32) if saved is None else saved

    # -- known beginnings ----------------------------------------------------------------------------------------------

    def look_up(self, row: int) -> None:
        """Notes what the prefix index holds of a row in the queue. At least its last token is always computed."""
        prefixes, table = self.pool.prefixes, self._table
        if prefixes is None:
            return
        ids = self._find(row, self._known(row), prefixes)
        self._found[row] = ids
        table.found[row] = len(ids)
        table.cached[row] = max(len(ids) * prefixes.block_size, int(table.swapped[row]))
        self.recount(row)

    def recount(self, row: int) -> None:
        """Notes how many of the found blocks others hold: only these cost nothing."""
        self._table.shared[row] = int(np.count_nonzero(self.pool.refs[self._found.get(row, NO_IDS)]))

    def _find(self, row: int, tokens: Ints, prefixes: PrefixIndex) -> Ints:
        """Ids of the longest run of full blocks from the start that is in the index."""
        size = prefixes.block_size
        keys = self._keys.setdefault(row, [])
        ids = []
        for i in range((len(tokens) - 1) // size):
            block_tokens = tokens[i * size : (i + 1) * size]
            if i == len(keys):
                parent = keys[-1] if keys else prefixes.root(self._table.request(row).cache_salt)
                keys.append(prefixes.key(parent, block_tokens))
            block = prefixes.find(keys[i], block_tokens)
            if block is None:
                break
            ids.append(block)
        return np.array(ids, np.int32)

    def _take_found(self, row: int, slot: int) -> BlockEntries:
        table = self._table
        ids = self._found.pop(row, NO_IDS)
        table.blocks[row] = len(ids)
        table.computed[row] = table.cached[row]
        table.carried[row] -= table.cached[row]
        if table.preemptions[row] == 0:
            table.hits[row] = table.cached[row]
        return self.pool.share(slot, ids) if self.pool.prefixes is not None else NO_ENTRIES

    def fetch(self, row: int) -> None:
        """A row that was swapped out has been given its blocks: what it did not find in the index is copied in."""
        table = self._table
        if self.host.holds(row):
            first, count = int(table.found[row]), int(blocks_for(table.swapped[row], self.pool.block_size))
            self.host.copy_in(row, first, self.pool.tables[table.slot[row], first:count].copy())
            table.swapped[row] = 0

    def remember(self, row: int, end: int) -> None:
        """Positions up to `end` of a row have been computed: the blocks that they fill can be found from now on."""
        prefixes, table = self.pool.prefixes, self._table
        if prefixes is None:
            return
        size, slot = prefixes.block_size, int(table.slot[row])
        keys = self._keys.setdefault(row, [])
        for i in range(int(table.found[row]), min(end, int(table.length[row])) // size):
            tokens = self._tokens[slot, i * size : (i + 1) * size]
            if i == len(keys):
                parent = keys[-1] if keys else prefixes.root(table.request(row).cache_salt)
                keys.append(prefixes.key(parent, tokens))
            prefixes.put(keys[i], int(self.pool.tables[slot, i]), tokens)

    def admission(self, row: int) -> Admission:
        """What the executor must know of a row that has just been taken."""
        table, request = self._table, self._table.request(row)
        slot = int(table.slot[row])
        return Admission(
            slot=slot,
            handle=request.handle,
            token_ids=self._tokens[slot, : table.length[row]].copy(),
            prompt_len=int(table.prompt_len[row]),
            params=request.params,
            stop_token_ids=request.stop_token_ids,
            choice=request.choice,
        )

    def append(self, rows: Longs, tokens: Ints) -> Ints:
        """One new token for each of rows int64[n]; returns their lengths int32[n]."""
        table = self._table
        length = table.length[rows]
        self._flat[table.slot[rows] * self._width + length] = tokens
        length += 1
        table.length[rows] = length
        return length

    def stop_running(self, row: int, phase: int) -> None:
        """A running row has ended or lost its place: its blocks will come back."""
        self.running.discard(row)
        self.leaving_blocks += int(self._table.blocks[row])
        self._table.phase[row] = phase

    def vacate(self, row: int) -> None:
        """Takes slot and blocks back; a row that is only leaving for a while keeps its tokens."""
        table = self._table
        slot = int(table.slot[row])
        self.lingering.discard(row)
        self.remember(row, int(table.computed[row]))
        if table.phase[row] == LEAVING:
            self._saved[row] = self._tokens[slot, : table.length[row]].copy()
            self._swap_out(row, slot)
        self.leaving_blocks -= int(table.blocks[row])
        self.pool.release(slot)
        self._free_slots.append(slot)
        table.slot[row] = -1
        table.carried[row] += table.computed[row]
        table.blocks[row] = table.computed[row] = table.shared[row] = table.found[row] = 0
        table.cached[row] = table.swapped[row]
        table.target[row] = table.length[row]

    def _swap_out(self, row: int, slot: int) -> None:
        """A row leaves for a while: its KV is copied to the host, if it has room there. All of it, also what others
        hold or the index knows: either may be gone when the row returns."""
        table = self._table
        table.lost[row] = computed = table.computed[row]
        if self.host.holds(row):
            count = int(blocks_for(computed, self.pool.block_size))
            self.host.copy_out(row, self.pool.tables[slot, :count].copy())
            table.swapped[row] = computed

    def forget(self, row: int) -> None:
        """A row will not come again."""
        self.host.release(row)
        self._saved.pop(row, None)
        self._keys.pop(row, None)
        self._found.pop(row, None)

    def check(self) -> None:
        """Raises AssertionError where rows, slots and blocks do not add up."""
        table = self._table
        seated = table.phase >= RUNNING
        slots = table.slot[seated]
        assert len(slots) + len(self._free_slots) == self.num_slots, "a slot is lost"
        assert sorted([*slots.tolist(), *self._free_slots]) == list(range(self.num_slots)), "a slot has two owners"
        np.testing.assert_array_equal(self.pool.held[slots], table.blocks[seated], "blocks held and counted differ")
        assert len(self.running) == np.count_nonzero(table.phase == RUNNING), "the board and the table differ"
        gone = (table.phase == LEAVING) | (table.phase == ENDED)
        assert self.leaving_blocks == table.blocks[gone].sum(), "blocks that will come back are miscounted"
        away = np.flatnonzero((table.phase == Phase.WAITING) & (table.swapped > 0))
        going = np.flatnonzero(table.phase == LEAVING)
        assert set(away.tolist()) <= self.host.rows <= set(away.tolist()) | set(going.tolist()), "host blocks of nobody"
        self.host.check()
        waiting_again = set(self._saved) - set(np.flatnonzero(table.phase == Phase.WAITING).tolist())
        assert not waiting_again, "tokens are kept of a row that does not wait"
