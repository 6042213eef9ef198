"""Cores and memory as cgroups limit them, in folders that look like a kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from headway.executors import machine

GIB = 2**30


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process sits in /pod/box, in a hierarchy without limits."""
    (tmp_path / "pod" / "box").mkdir(parents=True)
    (tmp_path / "self").write_text("0::/pod/box\n")
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN_CGROUP", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 64 * GIB}))
    return tmp_path


def test_no_limits(cgroups: Path):
    (cgroups / "pod" / "cpu.max").write_text("max 100000\n")
    (cgroups / "pod" / "memory.max").write_text("max\n")
    (cgroups / "pod" / "memory.current").write_text("123456\n")
    assert machine.available_cores() == 16
    assert machine.available_memory() == 64 * GIB


@pytest.mark.parametrize(("quota", "cores"), [("400000 100000", 4), ("250000 100000", 2), ("10000 100000", 1)])
@pytest.mark.parametrize("folder", [".", "pod", "pod/box"])
def test_the_share_of_any_group_around_counts(cgroups: Path, folder: str, quota: str, cores: int):
    (cgroups / folder / "cpu.max").write_text(quota + "\n")
    assert machine.available_cores() == cores


def test_the_tightest_group_says_how_much_memory(cgroups: Path):
    for folder, limit, used, cache in (("pod", 10, 4, 0), ("pod/box", 8, 7, 3)):
        (cgroups / folder / "memory.max").write_text(f"{limit * GIB}\n")
        (cgroups / folder / "memory.current").write_text(f"{used * GIB}\n")
        (cgroups / folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache * GIB}\nfile 2\n")
    assert machine.available_memory() == 4 * GIB


def test_a_machine_without_cgroups(cgroups: Path):
    (cgroups / "self").unlink()
    (cgroups / "cpu.max").write_text("100000 100000\n")
    assert machine.available_cores() == 16
    assert machine.available_memory() == 64 * GIB


def test_this_machine():
    assert 1 <= machine.available_cores() <= os.cpu_count()
    assert 0 < machine.available_memory() <= psutil.virtual_memory().total
