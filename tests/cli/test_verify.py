"""`headway verify`: what it proves of a sound engine, and that it notices an unsound one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headway.cli.main import main
from headway.core.config import SchedulerConfig
from headway.engine.config import EngineConfig
from headway.kernels import native
from headway.lab import verify
from headway.lab.verify import Answer, Check, Traffic

NATIVE = pytest.mark.skipif(native.module() is None, reason="the native kernels were not built")
SMALL = ["--num-prompts", "8", "--in-flight", "4", "--output-len", "40"]


@NATIVE
def test_the_native_kernels_keep_every_bit(tiny_model_dir: Path, capsys):
    flags = ["--kernels", "native", "--dtype", "bfloat16", "--block-size", "16", "--threads", "2"]
    assert main(["verify", str(tiny_model_dir), *SMALL, *flags]) == 0
    told = capsys.readouterr().out
    assert told.count("kept") == 11
    assert "BROKEN" not in told
    assert "native bfloat16" in told
    assert "equal to the bit" in told


def test_a_difference_is_found_and_told():
    truth = Answer([5, 6, 7], [-0.5, -0.25, -0.125], [{5: -0.5}, {6: -0.25, 8: -0.5}, {7: -0.125}], "a b c")
    other = Answer([5, 8, 7], [-0.5, -0.5, -0.125], truth.best, "a d c")
    shaken = Answer([5, 6, 7], [-0.5, -0.25, -0.1250001], truth.best, "a b c")
    check = verify._compare("way", [truth, truth, truth], [truth, other, shaken])
    assert (check.mismatches, check.bits, check.passed) == (1, 1, False)
    assert check.first == "request 1, token 1: 8 instead of 6, where the best two logits are 2.5e-01 apart"


def test_more_in_flight_than_a_step_has_tokens_by_default(tiny_model_dir: Path):
    traffic = Traffic.draw(4, 2, 600, 40_000, seed=0)
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", block_size=16, threads=1)
    checks = asyncio.run(verify.verify(config, traffic)).checks
    assert all(not check.mismatches for check in checks)


def test_a_way_that_was_never_gone_proves_nothing(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    """A pool that is not small after all: nobody is preempted, and the check says so instead of passing."""
    monkeypatch.setattr(verify, "SMALL_POOLS", (3.0,))
    monkeypatch.setattr(verify, "_compare", lambda name, *answers: Check(name))
    traffic = Traffic.draw(5, 4, 4, 40_000, seed=0)
    limits = SchedulerConfig(max_batch_size=4, max_num_seqs=4)
    config = EngineConfig(model=str(tiny_model_dir), dtype="float32", block_size=16, threads=1, scheduler=limits)
    check = asyncio.run(verify._preempt(config, traffic, []))
    assert not check.passed
    assert "nobody had to leave" in check.first
