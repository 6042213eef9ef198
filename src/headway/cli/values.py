"""What flags hold: counts, shares and sizes, each with an error that shows what a right value looks like."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

from headway.core.request import RequestError, Slo

_UNITS = {"": 1}
_UNITS |= {prefix: 10 ** (3 * power) for power, prefix in enumerate("kmgt", 1)}
_UNITS |= {prefix + "i": 2 ** (10 * power) for power, prefix in enumerate("kmgt", 1)}

T = TypeVar("T", int, float)


def _checked(convert: Callable[[str], T], text: str, accept: Callable[[T], bool], wanted: str) -> T:
    try:
        value = convert(text)
    except ValueError:
        value = convert("-1")
    if not accept(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def positive(text: str) -> int:
    """A whole number of at least one."""
    return _checked(int, text, lambda value: value >= 1, "a whole number of at least 1")


def natural(text: str) -> int:
    """A whole number of at least zero."""
    return _checked(int, text, lambda value: value >= 0, "a whole number of at least 0")


def share(text: str) -> float:
    """A number in (0, 1]."""
    return _checked(float, text, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def rate(text: str) -> float:
    """A number above zero; "inf" too."""
    return _checked(float, text, lambda value: value > 0, "a number above 0, or inf")


def nonnegative(text: str) -> float:
    """A finite number of at least zero."""
    return _checked(float, text, lambda value: 0 <= value < math.inf, "a number of at least 0")


def milliseconds(text: str) -> float:
    """A finite number of milliseconds, at least zero, in seconds."""
    return nonnegative(text) / 1000


def class_slo(text: str) -> tuple[str, Slo]:
    """What a class is promised, in milliseconds, from "realtime=ttft:2000,tpot:100"; "=..." is for those of none."""
    name, equals, promises = text.partition("=")
    parts = dict(part.partition(":")[::2] for part in promises.split(","))
    if (
        not equals
        or name not in ("", "realtime", "batch")
        or not set(parts) <= {"ttft", "tpot", "deadline", "max_queue"}
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not CLASS=PROMISE:MS,... (realtime, batch or none; ttft, tpot, deadline, max_queue)"
        )
    try:
        return name, Slo(**{promise: milliseconds(value) for promise, value in parts.items()})
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def memory_size(text: str) -> int:
    """Bytes from "4G" (10^9 each), "4GiB" (2^30 each), "512M" or plain digits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes such as 4G, 4GiB or 512M")
    return size


def swap_size(text: str) -> int:
    """Bytes from a number of GiB, as vLLM takes it, or from a size with its unit; 0 is none."""
    try:
        size = float(text)
    except ValueError:
        return memory_size(text)
    return int(_checked(float, text, lambda value: 0 <= value < math.inf, "a number of GiB") * 2**30) if size else 0


def tenant_weight(text: str) -> tuple[str, float]:
    """A tenant's name and its weight, from "big=2"."""
    name, _, weight = text.rpartition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tenant's name and weight such as big=2")
    return name, _checked(float, weight, lambda value: 0 < value < math.inf, "a weight: a number above 0")


def port_number(text: str) -> int:
    """A TCP port, or 0 for one that is free."""
    return _checked(int, text, lambda value: 0 <= value <= 65535, "a port: a whole number from 0 to 65535")
