"""Tenants: whose requests are, what share each is due, and those who wait for others of their tenant to end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core.table import RequestTable

if TYPE_CHECKING:
    from headway.core.strategies import Strategies


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: its part of the service, against the weights of the others who want some. `max_in_flight`: sequences
    of it in the queue and on board at a time (None: no bound); more wait outside."""

    weight: float = 1.0
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"a tenant's weight must be positive and finite, got {self.weight}")
        if self.max_in_flight is not None and not 1 <= self.max_in_flight < 2**31:
            raise ValueError(f"a tenant's max_in_flight must be from 1 to 2**31 - 1, got {self.max_in_flight}")


class Quotas:
    """Counts each tenant's rows in flight, and keeps those that its limit does not let in, first come, first served.

    A row that is held is not in the queue: policy, formation and budget do not know of it.
    """

    def __init__(self, table: RequestTable, strategies: Strategies) -> None:
        self._table = table
        self._strategies = strategies
        self._in_flight: dict[str, int] = {}
        self._held: dict[str, dict[int, None]] = {}

    def __len__(self) -> int:
        """Rows that are held."""
        return sum(map(len, self._held.values()))

    def __contains__(self, row: int) -> bool:
        return row in self._held.get(self._tenant(row), ())

    @property
    def rows(self) -> list[int]:
        return [row for held in self._held.values() for row in held]

    def enter(self, row: int) -> bool:
        """A row has come. False where its tenant has as many in flight as it may: then it is held."""
        tenant = self._tenant(row)
        if tenant not in self._held and self._has_room(tenant):
            self._in_flight[tenant] = self._in_flight.get(tenant, 0) + 1
            return True
        self._held.setdefault(tenant, {})[row] = None
        return False

    def leave(self, row: int) -> list[int]:
        """A row has ended. Returns those that it was in the way of, which are in flight from now on."""
        tenant = self._tenant(row)
        held = self._held.get(tenant, {})
        if row in held:
            del held[row]
            if not held:
                del self._held[tenant]
            return []
        self._in_flight[tenant] -= 1
        if not self._in_flight[tenant]:
            del self._in_flight[tenant]
        return self.release([tenant])

    def release(self, tenants: Iterable[str] | None = None) -> list[int]:
        """The rows of these tenants (None: of all) that their limits let in now."""
        released = []
        for tenant in list(self._held) if tenants is None else tenants:
            held = self._held.get(tenant, {})
            while held and self._has_room(tenant):
                row = next(iter(held))
                del held[row]
                self._in_flight[tenant] = self._in_flight.get(tenant, 0) + 1
                released.append(row)
            if not held:
                self._held.pop(tenant, None)
        return released

    def _has_room(self, tenant: str) -> bool:
        terms = self._strategies.config.tenants.get(tenant)
        return terms is None or terms.max_in_flight is None or self._in_flight.get(tenant, 0) < terms.max_in_flight

    def _tenant(self, row: int) -> str:
        return self._table.request(row).tenant

    def check(self) -> None:
        """Raises AssertionError where the counts are not those of the table, or somebody is held without need."""
        table = self._table
        for tenant, held in self._held.items():
            assert held, f"{tenant!r} is kept though nobody is held"
            assert not self._has_room(tenant), f"{tenant!r} has room, but somebody is held"
        in_flight: dict[str, int] = {}
        held_rows = set(self.rows)
        for row, request in enumerate(table.requests):
            if request is not None and table.live(row) and row not in held_rows:
                in_flight[request.tenant] = in_flight.get(request.tenant, 0) + 1
        assert in_flight == self._in_flight, "sequences in flight are miscounted"
