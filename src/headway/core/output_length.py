"""OutputLengthPredictor: how many tokens a request will generate, learnt online from those that have ended.

Kept are hazards: of the requests that came as far as a length, how many ended there. What a request has survived so far
then needs no other model than the one for new requests, and one that was cut off (by max_tokens, or by its client)
counts as far as it came, so that long answers are not forgotten because they were cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.core.batch import Ints, Longs
from headway.core.table import Floats, RequestTable, Rows

EDGES: Floats = np.concatenate([[0.0], np.unique(np.round(2.0 ** (np.arange(0, 69) / 4)))])
"""Lengths in tokens; bin i holds the lengths in (EDGES[i - 1], EDGES[i]], each about a fifth longer than the last."""
ENTROPY_EDGES: Floats = np.array([0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0])
"""In nats."""
KNOWN_AFTER = 16
PRIOR = 8.0
"""Requests' worth of belief that a group behaves as the larger one it belongs to."""
MEMORY = 4000
"""Requests after which what was learnt counts for a third."""
REBUILD_EVERY = 16
MOST_GROUPS = 512


class OutputLengthPredictor:
    """Groups of requests, each a part of a larger one: all, of a class, its tenants, by max_tokens, by prompt length,
    and by the entropy of the first token's distribution, once that is known.

    A group of few requests is believed to be like the larger one. The entropy is used only while it pays: while, over
    the latest ends, it made what happened more likely by more than chance would. Requests that ignore EOS have a known
    length: they teach nothing and are always right.
    """

    ENTROPY_LEVEL = 5

    def __init__(self) -> None:
        bins = len(EDGES)
        self._events = np.zeros((MOST_GROUPS, bins))
        self._at_risk = np.zeros((MOST_GROUPS, bins))
        self._survival = np.ones((MOST_GROUPS, bins))
        self._median = np.zeros(MOST_GROUPS)
        self._parent = np.zeros(MOST_GROUPS, np.int64)
        self._level = np.zeros(MOST_GROUPS, np.int64)
        self._groups: dict[tuple[int, int], int] = {(-1, 0): 0}
        self._weight = 1.0
        self._ends = 0
        self._seen = 0
        self._gain = Gain()
        self._rebuild()

    @property
    def entropy_pays(self) -> bool:
        return self._gain.positive

    def begin(self, table: RequestTable, rows: Longs) -> None:
        """Requests int64[n] have come: notes their group, and the length to expect."""
        for row in rows.tolist():
            if table.request(row).params.ignore_eos:
                table.length_group[row] = -1
                continue
            group = 0
            for part in _parts(table, row):
                group = self._part(group, part)
            table.length_group[row] = group
            if self._ends >= KNOWN_AFTER:
                allowed = int(table.limit[row] - table.prompt_len[row])
                table.predicted[row] = min(allowed, max(1, math.ceil(self._median[group])))

    def note_entropy(self, table: RequestTable, rows: Longs, entropy: Floats) -> None:
        """The first tokens of rows int64[n] were drawn from distributions of `entropy` float64[n] nats."""
        learns = (table.length_group[rows] >= 0) & np.isfinite(entropy)
        buckets = np.searchsorted(ENTROPY_EDGES, entropy)
        for row, bucket in zip(rows[learns].tolist(), buckets[learns].tolist(), strict=True):
            group = int(table.length_group[row])
            if self._level[group] == self.ENTROPY_LEVEL - 1:
                table.length_group[row] = self._part(group, bucket)

    def refresh(self, table: RequestTable, rows: Longs) -> None:
        """Writes the median of what rows int64[n] may still become to table.predicted."""
        rows = rows[table.length_group[rows] >= 0]
        if len(rows) and self._ends >= KNOWN_AFTER:
            expected = np.ceil(self.quantiles(Rows(table, rows, 0.0), [0.5])[:, 0])
            table.predicted[rows] = np.maximum(expected, 1)

    def finished(self, table: RequestTable, row: int, natural: bool) -> None:
        """A request has ended, by itself (`natural`) or cut off."""
        group, length = int(table.length_group[row]), int(table.length[row] - table.prompt_len[row])
        if group < 0 or length < 1:
            return
        self._ends += natural
        table.lengths_known = self._ends >= KNOWN_AFTER
        self._seen += 1
        length = min(length, int(EDGES[-1]))
        survived = int(np.searchsorted(EDGES, length, "left" if natural else "right")) - 1
        if self._level[group] == self.ENTROPY_LEVEL:
            inner, outer = self._survival[group], self._survival[self._parent[group]]
            self._gain.add(_log_likelihood(inner, survived, natural) - _log_likelihood(outer, survived, natural))
        while True:
            self._at_risk[group, 1 : survived + 1 + natural] += self._weight
            if natural:
                self._events[group, survived + 1] += self._weight
            if group == 0:
                break
            group = int(self._parent[group])
        self._weight *= 1 + 1 / MEMORY
        if self._seen < 2 * KNOWN_AFTER or self._seen % REBUILD_EVERY == 0:
            self._rebuild()

    def quantiles(self, rows: Rows, shares: Sequence[float]) -> Floats:
        """float64[n, len(shares)]: output lengths in tokens, the whole answer, which `shares` of requests like these,
        that have come as far as these, do not exceed. What max_tokens allows before anything is known."""
        most = (rows.limit - rows.prompt_len).astype(np.float64)
        groups = rows.length_group
        known = (groups >= 0) & (self._ends >= KNOWN_AFTER)
        result = np.repeat(most[:, None], len(shares), axis=1)
        if known.any():
            came = (rows.length - rows.prompt_len)[known].astype(np.float64)
            survival = self._survival[self._trusted(groups[known])]
            for i, share in enumerate(shares):
                lengths = _lengths_at(survival, (1 - share) * _survival_at(survival, came))
                result[known, i] = np.minimum(most[known], np.maximum(lengths, came + 1))
        return result

    def _trusted(self, groups: Ints) -> Longs:
        """The groups, without the entropy where it does not pay."""
        by_entropy = self._level[groups] == self.ENTROPY_LEVEL
        return np.where(by_entropy & (not self.entropy_pays), self._parent[groups], groups)

    def _part(self, group: int, part: int) -> int:
        """The group of those in `group` that have this in common; the group itself where there are too many."""
        found = self._groups.get((group, part))
        if found is not None:
            return found
        if len(self._groups) == MOST_GROUPS:
            return group
        new = len(self._groups)
        self._groups[group, part] = new
        self._parent[new], self._level[new] = group, self._level[group] + 1
        self._survival[new], self._median[new] = self._survival[group], self._median[group]
        return new

    def _rebuild(self) -> None:
        """Survival of each group from its hazards and, as far as it is small, its larger group's."""
        if self._weight > 1e9:
            self._events, self._at_risk, self._weight = self._events / self._weight, self._at_risk / self._weight, 1.0
        count, prior = len(self._groups), PRIOR * self._weight
        hazards = np.full((count, len(EDGES)), 0.05)
        for level in range(self.ENTROPY_LEVEL + 1):
            groups = np.flatnonzero(self._level[:count] == level)
            larger = hazards[self._parent[groups]]
            hazards[groups] = (self._events[groups] + prior * larger) / (self._at_risk[groups] + prior)
        hazards[:, 0] = 0.0
        np.cumprod(1 - hazards, axis=1, out=self._survival[:count])
        self._median[:count] = _lengths_at(self._survival[:count], np.full(count, 0.5))


class Gain:
    """Whether something pays: the mean of its gains, and how sure that is."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._square = 0.0

    def add(self, gain: float) -> None:
        self.count += 1
        share = 1 / min(self.count, MEMORY)
        self.mean += share * (gain - self.mean)
        self._square += share * (gain * gain - self._square)

    @property
    def positive(self) -> bool:
        """By two standard errors, after 64 at least."""
        if self.count < 64:
            return False
        spread = np.sqrt(max(self._square - self.mean**2, 0.0) / min(self.count, MEMORY))
        return bool(self.mean > 2 * spread)


def _parts(table: RequestTable, row: int) -> tuple[int, int, int, int]:
    """What a request has in common with others, the most telling first: class, tenant, max_tokens, prompt length; the
    last two in powers of two and of its root."""
    prompt_len = int(table.prompt_len[row])
    allowed = int(table.limit[row]) - prompt_len
    return (
        int(table.request_class[row]),
        int(table.tenant[row]),
        allowed.bit_length(),
        int(2 * np.log2(prompt_len)),
    )


def _log_likelihood(survival: Floats, survived: int, natural: bool) -> float:
    """Of having come through `survived` bins and, if natural, having ended in the next."""
    share = survival[survived] - survival[survived + 1] if natural else survival[survived]
    return float(np.log(max(share, 1e-12)))


def _survival_at(survival: Floats, length: Floats) -> Floats:
    """float64[n, bins], float64[n] -> float64[n]: the share that is longer than `length` tokens."""
    after = np.clip(np.searchsorted(EDGES, length, "right"), 1, len(EDGES) - 1)
    each = np.arange(len(length))
    part = (length - EDGES[after - 1]) / (EDGES[after] - EDGES[after - 1])
    before = survival[each, after - 1]
    result: Floats = before + np.minimum(part, 1.0) * (survival[each, after] - before)
    return result


def _lengths_at(survival: Floats, share: Floats) -> Floats:
    """float64[n, bins], float64[n] -> float64[n]: the length in tokens that only `share` of the requests exceed."""
    after = np.clip(np.count_nonzero(survival > share[:, None], axis=1), 1, len(EDGES) - 1)
    each = np.arange(len(share))
    before, behind = survival[each, after - 1], survival[each, after]
    part = np.clip((before - share) / np.maximum(before - behind, 1e-300), 0.0, 1.0)
    result: Floats = EDGES[after - 1] + part * (EDGES[after] - EDGES[after - 1])
    return result
