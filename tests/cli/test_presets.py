"""Presets: what they set is what the flags that they print would set, and flags that are given win."""

from __future__ import annotations

import argparse

import pytest

from headway.cli.engine_flags import add_engine_arguments, engine_config
from headway.core.config import SchedulerConfig
from headway.core.presets import PRESETS, Setting
from headway.core.scheduler import Scheduler


def config(*flags: str) -> SchedulerConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config(parser.parse_args(flags)).scheduler


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_flags_it_prints(name, capsys):
    by_preset = config("--preset", name)
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == len(PRESETS[name])
    flags = [word for setting in PRESETS[name] for word in setting.flag.split()]
    assert config(*flags) == by_preset
    for setting, line in zip(PRESETS[name], printed, strict=True):
        assert setting.flag in line
        assert setting.why in line
        assert getattr(by_preset, setting.field) == setting.value


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_scheduler(name):
    made = config("--preset", name)
    Scheduler.of(made, num_blocks=1000, block_size=16, max_model_len=512)


def test_flags_that_are_given_win(capsys):
    made = config("--preset", "batch", "--policy", "fcfs", "--max-num-batched-tokens", "100")
    assert (made.policy, made.max_num_batched_tokens, made.max_batch_size) == ("fcfs", 100, 100)
    assert "--policy" not in capsys.readouterr().err


def test_a_limit_that_is_given_pulls_the_presets_along():
    made = config("--preset", "offline", "--max-num-seqs", "8")
    assert (made.max_num_seqs, made.max_batch_size, made.max_num_batched_tokens) == (8, 8, 4096)


def test_flags_are_spelled_as_on_the_command_line():
    assert Setting("tpot_slo", 0.05, "").flag == "--tpot-slo-ms 50"
    assert Setting("max_batch_size", 8, "").flag == "--max-batch-size 8"
    assert Setting("backfill", False, "").flag == "--no-backfill"
    assert Setting("length_clusters", True, "").flag == "--length-clusters"


def test_clusters_and_window_arrive():
    made = config("--batching", "dynamic", "--length-clusters", "--cluster-wait-ms", "500", "--wait-window", "adaptive")
    assert (made.length_clusters, made.cluster_wait, made.wait_window) == (True, 0.5, "adaptive")
