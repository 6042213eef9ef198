"""RequestTable: one row per live request, one column per fact; RowSet: rows that have something in common."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.batch import Bools, Ints, Longs
from headway.core.request import Request

Floats = npt.NDArray[np.float64]


class Phase(IntEnum):
    """Where a row stands in its life. What it spends its time on is accounting's business."""

    FREE = 0
    WAITING = 1
    RUNNING = 2
    LEAVING = 3
    """Preempted, but a launched step still touches its blocks; it waits again once that step is collected."""
    ENDED = 4
    """Finished or aborted, but a launched step still touches its blocks."""


# Members as plain numbers: in the hot paths an attribute of an enum costs more than the comparison it is for.
RUNNING, LEAVING, ENDED = int(Phase.RUNNING), int(Phase.LEAVING), int(Phase.ENDED)

FEW = 4
"""Stop tokens of a request that have columns of their own."""


class RequestTable:
    """The hot facts of every live request as numpy columns of equal length, grown by doubling.

    phase int8; slot int64, the executor's row or -1; handle int64; seq int64, the order of adding (breaks ties);
    arrival float64 s; first_token float64 s (nan before it); priority, tenant, request_class int32 (the last two as
    codes); deadline and first_due float64 s on the engine's clock, by when its last and first token are promised; tpot
    float64 s, what is promised per token after the first (inf where nothing is). All others are int32: prompt_len;
    length, known tokens; target, length and the tokens that launched steps will yield; limit, the length at which it
    ends; computed, tokens whose KV exists or is being computed by a launched step; cached, those that need not be
    computed when it joins (the prefix index held them when last asked, or they are swapped out); shared, blocks of what
    is found that others hold; hits, tokens it found at first; chain, launched steps that may hold the row; launched,
    steps that do; blocks, KV blocks held; preemptions; carried, tokens computed for it that `computed` does not show;
    found, blocks that the prefix index held when last asked; swapped, tokens whose KV lies in the host's memory; lost,
    tokens whose KV it had when it was preempted; guarded_until, the step until which it should not leave again;
    backfilled, 1 when let past another that did not fit; predicted, output length to expect; length_group, whose
    output lengths are like its own (-1: its length is known); relegated, 1 when it was predicted on arrival that its
    promise cannot be kept. stop_ids: as many columns as a row has stop tokens, padded with -1,
    but FEW at most: rows that have more are looked up one by one, so that they slow nobody else's steps down.
    """

    # `choice`, the seed and whatever else only the executor reads stay in the Request.
    phase: npt.NDArray[np.int8]
    slot: Longs
    handle: Longs
    seq: Longs
    arrival: Floats
    first_token: Floats
    deadline: Floats
    first_due: Floats
    tpot: Floats
    priority: Ints
    tenant: Ints
    request_class: Ints
    prompt_len: Ints
    length: Ints
    target: Ints
    limit: Ints
    computed: Ints
    cached: Ints
    shared: Ints
    hits: Ints
    chain: Ints
    launched: Ints
    blocks: Ints
    preemptions: Ints
    carried: Ints
    backfilled: Ints
    found: Ints
    swapped: Ints
    lost: Ints
    guarded_until: Ints
    predicted: Ints
    length_group: Ints
    relegated: Ints
    stop_ids: list[Ints]

    _COUNTS = (
        "priority tenant request_class prompt_len length target limit computed cached shared hits chain launched "
        "blocks preemptions carried backfilled found swapped lost guarded_until predicted length_group relegated"
    )
    _FROM_ZERO = (
        *("computed", "cached", "shared", "hits", "launched", "blocks", "preemptions", "carried", "backfilled"),
        *("found", "swapped", "lost", "guarded_until", "relegated"),
    )
    _COLUMNS = {
        "phase": np.int8,
        "slot": np.int64,
        "handle": np.int64,
        "seq": np.int64,
        "arrival": np.float64,
        "first_token": np.float64,
        "deadline": np.float64,
        "first_due": np.float64,
        "tpot": np.float64,
        **dict.fromkeys(_COUNTS.split(), np.int32),
    }

    def __init__(self, capacity: int = 256, tokens: int = 1) -> None:
        self.capacity = capacity
        for name, dtype in self._COLUMNS.items():
            setattr(self, name, np.zeros(capacity, dtype))
        self.stop_ids = [np.full(capacity, -1, np.int32)]
        self._many_stops: dict[int, frozenset[int]] = {}
        self.requests: list[Request | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._row_of: dict[int, int] = {}
        self._seq = 0
        self._codes: dict[str, int] = {"": 0}
        self.step = 0
        """Number of the step that is being put together."""
        self.lengths_known = False
        """Whether `predicted` has been learnt; until then it is what max_tokens allows."""

    def __len__(self) -> int:
        return len(self._row_of)

    def code(self, name: str) -> int:
        """A small number for a tenant's or class's name; the same name always has the same number."""
        return self._codes.setdefault(name, len(self._codes))

    def row_of(self, handle: int) -> int | None:
        return self._row_of.get(handle)

    def live(self, row: int) -> bool:
        """Whether there is such a request and it has not ended."""
        return int(self.phase[row]) not in (Phase.FREE, ENDED)

    def renumber(self, row: int) -> None:
        """The row joins the queue later than it was added: behind all who are there."""
        self.seq[row] = self._seq
        self._seq += 1

    def add(self, request: Request, limit: int, chain: int) -> int:
        """A new row in phase WAITING; `limit` is the length in tokens at which the request ends."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        prompt_len = len(request.prompt_token_ids)
        self._row_of[request.handle] = row
        self.requests[row] = request
        self.phase[row] = Phase.WAITING
        self.slot[row] = -1
        self.handle[row] = request.handle
        self.seq[row] = self._seq
        self.arrival[row] = request.arrival
        self.first_token[row] = np.nan
        slo = request.slo
        self.deadline[row] = request.arrival + slo.deadline
        self.first_due[row] = request.arrival + slo.ttft
        self.tpot[row] = slo.tpot
        self.priority[row] = request.priority
        self.tenant[row] = self.code(request.tenant)
        self.request_class[row] = self.code(request.request_class)
        self.prompt_len[row] = self.length[row] = self.target[row] = prompt_len
        self.limit[row] = limit
        self.chain[row] = chain
        for name in self._FROM_ZERO:
            getattr(self, name)[row] = 0
        self.predicted[row] = limit - prompt_len
        self.length_group[row] = -1
        self._set_stops(row, tuple(request.stop_token_ids))
        self._seq += 1
        return row

    def stops(self, rows: Longs, tokens: Ints) -> Bools:
        """bool[n]: which of rows int64[n] end with tokens int32[n]."""
        result: Bools = self.stop_ids[0][rows] == tokens
        for column in self.stop_ids[1:]:
            result |= column[rows] == tokens
        if self._many_stops:
            for i, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
                result[i] |= token in self._many_stops.get(row, ())
        return result

    def free(self, row: int) -> None:
        del self._row_of[int(self.handle[row])]
        self.requests[row] = None
        self._many_stops.pop(row, None)
        self.phase[row] = Phase.FREE
        self._free.append(row)

    def request(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def _set_stops(self, row: int, stops: tuple[int, ...]) -> None:
        if len(stops) > FEW:
            self._many_stops[row] = frozenset(stops)
            stops = ()
        while len(stops) > len(self.stop_ids):
            self.stop_ids.append(np.full(self.capacity, -1, np.int32))
        for i, column in enumerate(self.stop_ids):
            column[row] = stops[i] if i < len(stops) else -1

    def _grow(self) -> None:
        old, self.capacity = self.capacity, 2 * self.capacity
        for name in self._COLUMNS:
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.stop_ids = [np.concatenate([column, np.full_like(column, -1)]) for column in self.stop_ids]
        self.requests.extend([None] * old)
        self._free.extend(range(self.capacity - 1, old - 1, -1))


class Rows:
    """Some rows of the table, read by column: `rows.arrival` is float64[n]. What policies and their like are given.

    Derived columns: `work`, tokens still to compute before the next token is sampled, what the prefix index is known to
    hold not counted; `waited`, seconds since arrival. `requests`: the cold facts. `step`: the number of the step that
    is being put together.
    """

    __slots__ = ("_table", "index", "now")

    def __init__(self, table: RequestTable, index: Longs, now: float) -> None:
        self._table = table
        self.index = index
        self.now = now

    def __len__(self) -> int:
        return len(self.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)[self.index]

    def among(self, chosen: Longs | Bools) -> Rows:
        """Those of these rows at int64[m] positions, or where bool[n] says so."""
        return Rows(self._table, self.index[chosen], self.now)

    @property
    def work(self) -> Ints:
        table, index = self._table, self.index
        result: Ints = table.target[index] - np.maximum(table.computed[index], table.cached[index])
        return result

    def code(self, name: str) -> int:
        """The number that stands for a tenant's or a class's name in their columns."""
        return self._table.code(name)

    @property
    def served(self) -> Ints:
        """int32[n]: tokens computed for it, recomputation included."""
        table, index = self._table, self.index
        result: Ints = table.computed[index] + table.carried[index]
        return result

    @property
    def requests(self) -> list[Request]:
        return [self._table.request(row) for row in self.index.tolist()]

    @property
    def step(self) -> int:
        return self._table.step

    @property
    def sure(self) -> Bools:
        """bool[n]: whose `predicted` is known or learnt, not only what max_tokens allows."""
        table = self._table
        result: Bools = (table.length_group[self.index] < 0) | table.lengths_known
        return result

    @property
    def waited(self) -> Floats:
        result: Floats = self.now - self._table.arrival[self.index]
        return result


class RowSet:
    """A set of row numbers as an array: add and discard in constant time, members as a view without copying."""

    def __init__(self, capacity: int = 64) -> None:
        self._members = np.zeros(capacity, np.int64)
        self._position: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._position)

    def __contains__(self, row: int) -> bool:
        return row in self._position

    @property
    def rows(self) -> Longs:
        """int64[n], a view that the next add or discard changes."""
        return self._members[: len(self._position)]

    def add(self, row: int) -> None:
        if row in self._position:
            return
        count = len(self._position)
        if count == len(self._members):
            self._members = np.concatenate([self._members, np.zeros_like(self._members)])
        self._members[count] = row
        self._position[row] = count

    def discard(self, row: int) -> None:
        position = self._position.pop(row, None)
        if position is None:
            return
        last = len(self._position)
        if position != last:
            moved = int(self._members[last])
            self._members[position] = moved
            self._position[moved] = position


__all__ = ["Bools", "Floats", "Phase", "RequestTable", "RowSet", "Rows"]
