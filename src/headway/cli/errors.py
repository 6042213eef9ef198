"""How a command can fail by no defect of ours: one line for a person, an exit status, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CommandError(Exception):
    """What the user asked for could not be done; the message says why and what to do. Exit status 1."""


class UsageError(CommandError):
    """The command was called wrongly. Exit status 2, with the usage line."""


@contextmanager
def engine_errors() -> Iterator[None]:
    """Turn what an engine raises for a wrong model, setting or request into CommandError."""
    from headway.core.errors import ModelError
    from headway.core.request import RequestError
    from headway.engine.stream import EngineDead, GenerationError

    try:
        yield
    except (ModelError, RequestError, EngineDead, GenerationError) as error:
        raise CommandError(str(error)) from None
