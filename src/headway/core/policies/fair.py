"""Fair sharing between tenants."""

from __future__ import annotations

from collections.abc import Mapping

from headway.core.batch import Ints
from headway.core.policies.base import Policy
from headway.core.policies.shares import Shares
from headway.core.table import Floats, Rows


class Fair(Policy):
    """Equal service for every tenant, or by weight. Not bounded: a tenant's backlog waits for all other tenants' work.

    `weights`: tenant name to weight, 1 where not named. First come, first served within a tenant.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        for tenant, weight in self.weights.items():
            if not weight > 0:
                raise ValueError(f"a tenant's weight must be positive, got {weight} for {tenant!r}")
        self.shares = Shares()

    def score(self, queue: Rows, now: float) -> Floats:
        return self.shares.score(queue.index, queue.tenant)

    def arrived(self, rows: Rows, now: float) -> None:
        cost = rows.work + rows.predicted
        for i, request in enumerate(rows.requests):
            weight = self.weights.get(request.tenant, 1.0)
            self.shares.arrived(int(rows.index[i]), int(rows.tenant[i]), weight, float(cost[i]))

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        self.shares.served(rows.tenant, tokens)

    def ended(self, rows: Rows, now: float) -> None:
        for tenant in rows.tenant.tolist():
            self.shares.ended(tenant)
