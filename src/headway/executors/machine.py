"""What this process may use of the machine: cores and memory, as affinity and cgroups limit them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Cores that this process may use: its affinity, and what its cgroups grant, rounded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _own_cgroups():
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def available_memory() -> int:
    """Bytes that this process may still take: what the machine has free and its cgroups allow."""
    memory = psutil.virtual_memory().available
    for folder in _own_cgroups():
        limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
        if limit.isdigit() and used.isdigit():
            memory = min(memory, int(limit) - int(used) + _droppable(folder))
    return max(0, memory)


def _own_cgroups() -> Iterator[Path]:
    """The folders (cgroup v2) of this process' group and of those around it; none where there are none."""
    own = next((line[3:] for line in _read(OWN_CGROUP).splitlines() if line.startswith("0::")), None)
    if own is None:
        return
    folder = CGROUPS / own.strip().lstrip("/")
    while folder != CGROUPS:
        yield folder
        folder = folder.parent
    yield CGROUPS


def _droppable(folder: Path) -> int:
    """Bytes of cached files that count as used but give way."""
    lines = _read(folder / "memory.stat").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError:
        return ""
