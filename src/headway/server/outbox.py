"""Sending to many clients in one go: one callback a turn of the event loop instead of a task that wakes for each."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Generator
from typing import Any, Protocol


class Sender(Protocol):
    def gather(self) -> None:
        """Makes what is to be sent."""

    def push(self) -> None:
        """Sends it."""


class Outbox:
    """Senders that have something to send, pushed together at the end of the event loop's turn.

    All is made before anything is sent: sends that follow closely find their readers awake, which spares the kernel
    from waking them again for each.
    """

    def __init__(self) -> None:
        self._due: list[Sender] = []

    def add(self, sender: Sender) -> None:
        """`sender.gather()` and `sender.push()` are called soon. Not to be added again before that."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._flush)
        self._due.append(sender)

    def _flush(self) -> None:
        due, self._due = self._due, []
        for sender in due:
            sender.gather()
        for sender in due:
            sender.push()


def start(work: Awaitable[None]) -> asyncio.Task[None] | None:
    """Runs a coroutine up to where it first waits, as Python 3.12's eager tasks do.

    Returns None if it has ended, else the task that carries it on.
    """
    steps = work.__await__()
    try:
        awaited = next(steps)
    except StopIteration:
        return None
    return asyncio.ensure_future(_carry_on(steps, awaited))


@types.coroutine
def _carry_on(steps: Generator[Any, Any, None], awaited: Any) -> Generator[Any, None, None]:
    try:
        while True:
            yield awaited
            awaited = next(steps)
    except StopIteration:
        return
    finally:
        steps.close()
