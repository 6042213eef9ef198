"""Policies: who goes first. One small file each; `make` finds them by name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from headway.core.policies.aged import OVERTAKING, Aged
from headway.core.policies.base import Policy
from headway.core.policies.classes import Classes
from headway.core.policies.deadline import Edf, LeastLaxity
from headway.core.policies.fair import Fair
from headway.core.policies.fcfs import Fcfs
from headway.core.policies.hrrn import Hrrn
from headway.core.policies.lpm import Lpm
from headway.core.policies.mlfq import Mlfq
from headway.core.policies.priority import Priority
from headway.core.policies.shortest import Default, Shortest, Sjf, Srpt
from headway.core.policies.slo import ByPromise, Relegating
from headway.core.step_time import StepTimeModel

POLICIES: dict[str, type[Policy]] = {
    "default": Default,
    "fcfs": Fcfs,
    "priority": Priority,
    "shortest": Shortest,
    "sjf": Sjf,
    "srpt": Srpt,
    "hrrn": Hrrn,
    "edf": Edf,
    "least-laxity": LeastLaxity,
    "slo": ByPromise,
    "mlfq": Mlfq,
    "fair": Fair,
    "lpm": Lpm,
    "classes": Classes,
}
AGED = "aged:"


def make(
    name: str,
    step_time: StepTimeModel | None = None,
    overtaking: int = OVERTAKING,
    weights: Mapping[str, float] | None = None,
) -> Policy:
    """The policy of this name: one of POLICIES, or a user's own class as "module:Class" or "path/to/file.py:Class".

    "aged:" before any of these wraps it in Aged. `step_time` is for those that predict how long a request will take,
    `overtaking` the bound in tokens of those that are aged, and the credit of those that share by tenant, `weights`
    the tenants'.

    Raises:
        ValueError: there is none of this name, or it cannot be loaded; the message says why.
    """
    if name.startswith(AGED):
        return Aged(make(name.removeprefix(AGED), step_time, overtaking, weights), overtaking)
    if name == "default":
        return Default(overtaking)
    if name == "fair":
        return Fair(weights, credit=overtaking)
    if name == "least-laxity":
        return LeastLaxity(step_time)
    if name == "slo":
        return ByPromise(step_time)
    if name in POLICIES:
        return POLICIES[name]()
    if ":" in name:
        return _load(*name.rsplit(":", 1))
    raise ValueError(
        f"unknown policy {name!r}; there are: {', '.join(POLICIES)}; aged:NAME wraps any of them, "
        "and module:Class or file.py:Class loads one of your own"
    )


def summary(name: str) -> str:
    """One line about a policy of POLICIES: the first line of its docstring."""
    return (POLICIES[name].__doc__ or "").partition("\n")[0]


def _load(source: str, class_name: str) -> Policy:
    """A user's own policy."""
    name = f"{source}:{class_name}"
    try:
        module = _module(source)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(f"policy {name!r}: cannot import {source}: {type(error).__name__}: {error}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Policy)):
        what = (
            "there is no such name in it" if found is None else "it is not a subclass of headway.core.policies.Policy"
        )
        raise ValueError(f"policy {name!r}: {what}")
    try:
        return found()
    except TypeError as error:  # an argument without a default, or no score
        raise ValueError(f"policy {name!r} cannot be made without arguments: {error}") from error


def _module(source: str) -> ModuleType:
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    spec = importlib.util.spec_from_file_location(f"headway_policy_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None, "a .py file has a loader"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


__all__ = ["OVERTAKING", "POLICIES", "Aged", "Fcfs", "Policy", "Relegating", "make", "summary"]
