"""Policies: who goes first. One small file each; `make` finds them by name."""

from __future__ import annotations

from headway.core.policies.base import Policy
from headway.core.policies.fcfs import Fcfs

POLICIES: dict[str, type[Policy]] = {"fcfs": Fcfs}


def make(name: str) -> Policy:
    """The policy of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


__all__ = ["POLICIES", "Fcfs", "Policy", "make"]
