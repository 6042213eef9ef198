"""Executors: things that compute batches. Their bodies are imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable

from headway.executors.base import Capacity, Executor
from headway.executors.config import ExecutorConfig


def make_executor(name: str, config: ExecutorConfig, report: Callable[[str], None]) -> Executor:
    """The executor of this name, with its model loaded. `report` receives lines about start-up.

    Raises:
        ValueError: there is no such executor.
        ModelError: the model cannot be read or does not fit.
    """
    if name == "torch":
        from headway.executors.torch import TorchExecutor

        return TorchExecutor(config, report)
    raise ValueError(f"unknown executor {name!r}; there is: torch")


__all__ = ["Capacity", "Executor", "ExecutorConfig", "make_executor"]
