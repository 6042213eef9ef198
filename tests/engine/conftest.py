from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _tests_can_be_imported_by_engine_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They search modules where this process does."""
    root = str(Path(__file__).parents[2])
    if root not in sys.path:
        monkeypatch.syspath_prepend(root)
