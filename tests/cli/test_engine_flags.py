"""Flags to configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from headway.cli.engine_flags import add_engine_arguments, engine_config
from headway.cli.errors import UsageError
from headway.core.config import SchedulerConfig
from headway.engine.config import EngineConfig


def config(*flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config(parser.parse_args(flags))


def test_no_flags_are_the_defaults():
    assert config() == EngineConfig()


def test_every_flag_arrives():
    flags = (
        "--dtype float32 --device cpu --threads 3 --kernels torch --quantization int8 "
        "--max-model-len 99 --kv-cache-memory 1G --gpu-memory-utilization 0.5 "
        "--block-size 32 --max-batch-size 8 --max-num-batched-tokens 128 --max-num-seqs 24 --burst-size 8 "
        "--max-num-partial-prefills 3 --depth 1 --no-chunked-prefill --batching static --static-timeout 2 "
        "--max-wait-ms 20 --policy aged:sjf --budget prefill-first --tpot-slo-ms 30 --no-backfill --no-prefix-caching "
        "--preemption swap --swap-space 2 --kv-reservation full"
    )
    assert config(*flags.split()) == EngineConfig(
        dtype="float32",
        device="cpu",
        threads=3,
        kernels="torch",
        quantization="int8",
        max_model_len=99,
        kv_cache_memory=10**9,
        swap_space=2 * 2**30,
        gpu_memory_utilization=0.5,
        block_size=32,
        scheduler=SchedulerConfig(
            max_batch_size=8,
            max_num_batched_tokens=128,
            max_num_seqs=24,
            burst_size=8,
            max_num_partial_prefills=3,
            depth=1,
            chunked_prefill=False,
            batching="static",
            static_timeout=2.0,
            max_wait=0.02,
            policy="aged:sjf",
            budget="prefill-first",
            tpot_slo=0.03,
            backfill=False,
            prefix_caching=False,
            preemption="swap",
            kv_reservation="full",
        ),
    )


def test_limits_that_are_not_given_follow_those_that_are():
    few = config("--max-num-seqs", "4").scheduler
    assert (few.max_batch_size, few.max_num_seqs) == (4, 4)
    many = config("--max-num-seqs", "500").scheduler
    assert (many.max_batch_size, many.max_num_seqs) == (SchedulerConfig().max_batch_size, 500)
    wide = config("--max-batch-size", "2000").scheduler
    assert (wide.max_batch_size, wide.max_num_batched_tokens) == (2000, 2000)


def test_limits_that_contradict_each_other_are_refused():
    with pytest.raises(UsageError, match="max_num_batched_tokens"):
        config("--max-batch-size", "64", "--max-num-batched-tokens", "32")


@pytest.mark.parametrize("name", ["shortest-jb", "aged:", "no_such_file.py:Mine"])
def test_a_policy_that_is_not_there_is_refused(name: str):
    with pytest.raises(UsageError, match="policy"):
        config("--policy", name)


def test_a_policy_may_come_from_a_file(tmp_path: Path):
    source = "from headway.core.policies import Fcfs\n\n\nclass Mine(Fcfs):\n    pass\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    assert config("--policy", f"{tmp_path}/mine.py:Mine").scheduler.policy == f"{tmp_path}/mine.py:Mine"
