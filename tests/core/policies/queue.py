"""A small table of requests, and the order in which a policy would serve them."""

from __future__ import annotations

import numpy as np

from headway.core.policies import Policy
from headway.core.request import Request, SamplingParams, Slo
from headway.core.table import RequestTable, Rows


class Queue:
    """Requests by handle; each gets the row of its handle while none has ended."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.table = RequestTable(8)
        self.now = 0.0

    def add(
        self, prompt_len: int = 10, max_tokens: int = 10, deadline: float = np.inf, cached: int = 0, **facts: object
    ) -> int:
        handle = self.table._seq
        params = SamplingParams(max_tokens=max_tokens)
        facts = {"slo": Slo(deadline=deadline)} | facts
        request = Request(str(handle), handle, [1] * prompt_len, params, self.now, **facts)
        row = self.table.add(request, prompt_len + max_tokens, 2)
        self.table.cached[row] = cached
        self.policy.arrived(self.rows([handle]), self.now)
        return handle

    def rows(self, handles: list[int] | None = None) -> Rows:
        handles = list(self.table._row_of) if handles is None else handles
        return Rows(self.table, np.array([self.table.row_of(handle) for handle in handles], np.int64), self.now)

    def serve(self, handle: int, tokens: int) -> None:
        """A step computes so many of its tokens."""
        rows = self.rows([handle])
        self.policy.served(rows, np.array([tokens], np.int32), self.now)
        self.table.computed[rows.index] += tokens

    def end(self, handle: int) -> None:
        rows = self.rows([handle])
        self.policy.ended(rows, self.now)
        self.table.free(int(rows.index[0]))

    def order(self) -> list[int]:
        rows = self.rows()
        score = self.policy.score(rows, self.now)
        assert score.dtype == np.float64
        assert np.isfinite(score).all()
        return rows.handle[np.lexsort((rows.seq, score))].tolist()
