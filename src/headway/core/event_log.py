"""Replay: the scheduler is driven by its event log alone, so the same log gives the same batches."""

from __future__ import annotations

from collections.abc import Iterable

from headway.core.batch import Batch
from headway.core.request import RequestError
from headway.core.scheduler import Event, Scheduler


def replay(events: Iterable[Event], scheduler: Scheduler) -> list[Batch]:
    """Drives a fresh scheduler by what drove another; returns its batches in order.

    `scheduler` must be set up as the first one was. Raises KeyError where the log commits a step that this scheduler
    has not made, that is, where the two have parted.
    """
    batches: list[Batch] = []
    in_flight: dict[int, Batch] = {}
    for kind, now, *facts in events:
        if kind == "add":
            try:
                scheduler.add(facts[0], now)
            except RequestError:
                continue  # it was refused then, too
        elif kind == "abort":
            scheduler.abort(facts[0], now, facts[1], facts[2])
        elif kind == "schedule":
            batch = scheduler.schedule(now)
            if isinstance(batch, Batch):
                batches.append(batch)
                in_flight[batch.step_id] = batch
        elif kind == "add_late":
            batches[-1] = in_flight[facts[0]] = scheduler.add_late(in_flight[facts[0]], now)
        elif kind == "no_more":
            scheduler.no_more(now)
        elif kind == "unseat":
            scheduler.unseat(now)
        elif kind == "follow":
            scheduler.follow(facts[0], now)
        elif kind == "commit":
            scheduler.commit(in_flight.pop(facts[0]), facts[1], now)
        elif kind == "fail":
            scheduler.fail(in_flight.pop(facts[0]), facts[1], now)
        else:
            raise ValueError(f"unknown event {kind!r} in the log")
    return batches
