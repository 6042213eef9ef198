"""`make demo` does what the README says."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_the_demo_ends_well_within_four_minutes():
    start = time.perf_counter()
    done = subprocess.run(["make", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 240
    assert "answers cut to 64 tokens" in done.stdout
    assert re.search(r"64 │ +0 │ +0 │", done.stdout)  # requests, failed, short
