"""From what a caller names to what an engine is built of."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.config import SchedulerConfig
from headway.engine.config import EngineConfig

if TYPE_CHECKING:
    from headway.engine.loop import EngineLoop

Model = EngineConfig | str | os.PathLike[str] | None
"""A whole configuration, a model as `EngineConfig.model` names it, or None for the embedded one."""
Report = Callable[[str], None]
"""Receives lines about start-up for a person."""


def silent(line: str) -> None:
    """A report for nobody."""


BUILD_LOOP = "headway.engine.loop:build_loop"
DEFAULT_MODEL = "smollm2"

_SCHEDULER_FIELDS = {field.name for field in fields(SchedulerConfig)}
_ENGINE_FIELDS = {field.name for field in fields(EngineConfig)} - {"scheduler"}


def as_config(config: Model, overrides: Mapping[str, Any]) -> EngineConfig:
    """The configuration, with some of its fields or its scheduler's replaced.

    Raises:
        TypeError: a name that neither EngineConfig nor SchedulerConfig has.
        ValueError: a value of the wrong type or out of range.
    """
    if not isinstance(config, EngineConfig):
        config = EngineConfig(model=None if config is None else os.fspath(config))
    if unknown := set(overrides) - _SCHEDULER_FIELDS - _ENGINE_FIELDS:
        known = ", ".join(sorted(_SCHEDULER_FIELDS | _ENGINE_FIELDS))
        raise TypeError(f"no such setting: {', '.join(sorted(unknown))}. There are {known}.")
    scheduler = {name: value for name, value in overrides.items() if name in _SCHEDULER_FIELDS}
    engine = {name: value for name, value in overrides.items() if name in _ENGINE_FIELDS}
    config = replace(config, scheduler=replace(config.scheduler, **scheduler), **engine)
    try:
        msgspec.convert(msgspec.to_builtins(config), EngineConfig)  # dataclasses do not look at types
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"a setting has a wrong value: {str(error).replace('$.', '')}") from None
    return config


def model_name(config: EngineConfig) -> str:
    """What clients call the model."""
    return config.served_model_name or config.model or DEFAULT_MODEL


def make_loop(loop_factory: str, config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """Calls a "module:function"; the default is build_loop."""
    module, _, function = loop_factory.partition(":")
    loop: EngineLoop = getattr(importlib.import_module(module), function)(config, model_path, report)
    return loop
