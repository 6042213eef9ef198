"""The two ways in which a command can fail by its user's hand."""

from __future__ import annotations


class CommandError(Exception):
    """What the user asked for could not be done; the message says why and what to do. Exit status 1."""


class UsageError(CommandError):
    """The command was called wrongly. Exit status 2, with the usage line."""
