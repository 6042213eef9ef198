"""The facts of this machine that a figure depends on, found without importing anything heavy."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from headway.executors.machine import available_cores, available_memory

_PACKAGES = ("headway", "torch", "transformers", "tokenizers", "numpy")


def facts() -> dict[str, Any]:
    """Processor, cores that may be used, memory in bytes, GPUs, and the versions of what computes."""
    return {
        "processor": _processor(),
        "cores": available_cores(),
        "memory": psutil.virtual_memory().total,
        "memory_available": available_memory(),
        "gpus": _gpus(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpus() -> list[dict[str, Any]]:
    """Name and memory in bytes of each NVIDIA GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        fields = [line.rsplit(", ", 1) for line in answer.splitlines()]
        return [{"name": name, "memory": int(mebibytes) * 2**20} for name, mebibytes in fields]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
