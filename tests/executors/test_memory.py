"""The arithmetic of the KV pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import ModelError
from headway.executors.config import ExecutorConfig
from headway.executors.memory import gigabytes, kv_budget


@given(
    memory=st.integers(0, 10**12),
    bytes_per_token=st.integers(1, 10**6),
    block_size=st.sampled_from([1, 16, 32, 128]),
    max_num_seqs=st.integers(1, 2048),
    limit=st.integers(1, 200_000),
    wanted=st.none() | st.integers(1, 200_000),
)
def test_the_pool_fits_its_memory_and_every_sequence_the_pool(
    memory: int, bytes_per_token: int, block_size: int, max_num_seqs: int, limit: int, wanted: int | None
):
    config = ExecutorConfig("m", block_size=block_size, max_num_seqs=max_num_seqs, max_model_len=wanted)
    try:
        budget = kv_budget(config, bytes_per_token, limit, memory)
    except ModelError:
        block_bytes = block_size * bytes_per_token
        too_little = memory < 2 * block_bytes
        assert too_little or (
            wanted is not None and (wanted > limit or (wanted + block_size) * bytes_per_token > memory)
        )
        return
    assert budget.num_blocks >= 1
    assert (budget.num_blocks + 1) * block_size * bytes_per_token <= memory
    assert 1 <= budget.max_model_len <= min(limit, budget.num_tokens)
    assert wanted is None or budget.max_model_len == wanted
    assert budget.num_tokens <= max_num_seqs * (budget.max_model_len + block_size)


def test_no_more_blocks_than_all_slots_could_fill():
    config = ExecutorConfig("m", block_size=16, max_num_seqs=4, max_model_len=100)
    assert kv_budget(config, 1000, 2048, 10**9).num_blocks == 4 * 7


def test_the_report_adds_up():
    config = ExecutorConfig("m", block_size=16, max_num_seqs=64)
    text = str(kv_budget(config, 46_080, 8192, 2**30))
    assert text == (
        "KV pool 1.07 GB: 1,455 blocks of 16 tokens, 23,280 tokens at 46,080 bytes; sequences up to 8,192 tokens"
    )


@pytest.mark.parametrize(("size", "text"), [(4.2e9, "4.20 GB"), (12_000, "0.012 MB"), (5_000_000, "5.000 MB")])
def test_gigabytes(size: float, text: str):
    assert gigabytes(size) == text
