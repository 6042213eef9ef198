"""What can go wrong before anything is served."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be found, read or run. The message is one line: what, with which value, and what to do."""
