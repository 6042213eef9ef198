"""Attention over the paged pool against the textbook formula in float64, on ragged batches of every make."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.kernels.attention import FEW_TOKENS, AttentionPlan, batch_order
from headway.kernels.decode_attention import TILE, BagDecode, GatherDecode
from headway.kernels.kv_cache import KVCache, bytes_per_token, kv_dtype
from headway.kernels.prefill_attention import QUERY_TILE

LAYER, LAYERS = 1, 2


def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one whole sequence, q [T, H, D], k and v [T, KV, D], in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)


class Sequences:
    """Some sequences in one pool, computed in any steps. The pool is full of NaN at first: nobody may read others'."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lengths = lengths
        self.q, self.k, self.v = (
            [torch.randn(n, h, head_dim, generator=generator) for n in lengths] for h in (heads, kv_heads, kv_heads)
        )
        blocks = [-(-n // block_size) for n in lengths]
        self.cache = KVCache(LAYERS, sum(blocks) + 3, block_size, kv_heads, head_dim, dtype)
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        ids = np.random.default_rng(seed).permutation(self.cache.null_block)
        self.tables = np.full((len(lengths), max(blocks)), self.cache.null_block)
        for row, count in enumerate(blocks):
            self.tables[row, :count], ids = ids[:count], ids[count:]
        self.computed = [0] * len(lengths)
        self.out = [torch.empty(0, heads, head_dim) for _ in lengths]

    def step(self, rows: list[int], counts: list[int]) -> None:
        """One step that computes counts[i] more tokens of sequence rows[i]."""
        starts = [self.computed[row] for row in rows]
        spans = [(row, slice(start, start + n)) for row, start, n in zip(rows, starts, counts, strict=True)]
        q, k, v = (torch.cat([whole[row][span] for row, span in spans]) for whole in (self.q, self.k, self.v))
        heads = q.shape[1]
        plan = AttentionPlan(self.cache, heads, np.array(starts), np.array(counts), self.tables[rows])
        out = plan.attend(LAYER, q, k, v)
        for row, part in zip(rows, out.split(counts), strict=True):
            self.out[row] = torch.cat([self.out[row], part])
            self.computed[row] += len(part)

    def run(self, chunks: list[int]) -> None:
        """All sequences to their ends, everybody in every step, by chunks of these sizes in turn."""
        turn = 0
        while rows := [i for i, n in enumerate(self.lengths) if self.computed[i] < n]:
            counts = [min(chunks[(turn + i) % len(chunks)], self.lengths[i] - self.computed[i]) for i in rows]
            self.step(rows, counts)
            turn += 1

    def worst_error(self) -> float:
        """The largest difference from the textbook."""
        every = zip(self.q, self.k, self.v, self.out, strict=True)
        return max((out.double() - textbook(q, k, v)).abs().max().item() for q, k, v, out in every)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    chunks=st.lists(st.sampled_from([1, 1, 2, FEW_TOKENS, FEW_TOKENS + 1, 17, 70]), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1)]),
    head_dim=st.sampled_from([2, 8, 16]),
    block_size=st.sampled_from([1, 8, 16, 32]),
    seed=st.integers(0, 5),
)
def test_any_ragged_batch_equals_the_textbook(lengths, chunks, heads, head_dim, block_size, seed):
    sequences = Sequences(
        lengths, heads=heads[0], kv_heads=heads[1], head_dim=head_dim, block_size=block_size, seed=seed
    )
    sequences.run(chunks)
    assert sequences.worst_error() < 2e-6


@pytest.mark.parametrize("chunks", [[1000], [QUERY_TILE + 1, 1], [TILE, 5, 1]])
def test_contexts_of_many_tiles(chunks: list[int]):
    sequences = Sequences([2 * TILE + 45, 1, TILE, 600], block_size=32)
    sequences.run(chunks)
    assert sequences.worst_error() < 2e-6


def test_rows_of_very_different_lengths_in_one_step():
    sequences = Sequences([1100, 3, 300, 64, 1, 40])
    for row, length in enumerate(sequences.lengths):
        if length > 1:
            sequences.step([row], [length - 1])
    sequences.step([0, 1, 2, 3, 4, 5], [1] * 6)
    assert sequences.worst_error() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pool_of_any_dtype_and_queries_of_any_dtype(dtype: torch.dtype):
    """bfloat16 keys and values lose what rounding takes, and no more."""
    sequences = Sequences([70, 33, 5], dtype=dtype)
    sequences.run([20, 1])
    sequences.k, sequences.v = ([x.to(dtype).float() for x in whole] for whole in (sequences.k, sequences.v))
    assert sequences.worst_error() < 2e-6


def test_the_answer_has_the_queries_dtype():
    sequences = Sequences([30, 9])
    q, k, v = (torch.cat([whole[0][:20], whole[1][:1]]).bfloat16() for whole in (sequences.q, sequences.k, sequences.v))
    plan = AttentionPlan(sequences.cache, 4, np.array([0, 0]), np.array([20, 1]), sequences.tables)
    out = plan.attend(LAYER, q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[:20].double(), textbook(q[:20], k[:20], v[:20]), rtol=0.01, atol=0.01)


def test_layers_and_sequences_do_not_touch_each_other():
    sequences = Sequences([40, 40])
    other = sequences.cache.keys[1 - LAYER].clone()
    sequences.step([0], [40])
    assert torch.equal(sequences.cache.keys[1 - LAYER].isnan(), other.isnan())
    mine = np.unique(sequences.tables[0])
    others = np.setdiff1d(np.arange(sequences.cache.null_block), mine)
    assert sequences.cache.keys[LAYER][others].isnan().all()
    assert sequences.cache.values[LAYER][others].isnan().all()


def test_tokens_lie_where_the_table_says():
    sequences = Sequences([40])
    sequences.step([0], [40])
    for position in (0, 15, 16, 39):
        block, offset = sequences.tables[0, position // 16], position % 16
        assert torch.equal(sequences.cache.keys[LAYER][block, :, :, offset], sequences.k[0][position])
        assert torch.equal(sequences.cache.values[LAYER][block, :, offset], sequences.v[0][position])


def test_a_row_is_the_same_to_the_bit_in_any_company():
    together, alone = Sequences([300, 37, 129, 500]), Sequences([300, 37, 129, 500])
    together.run([1, 60, 3])
    for row in range(4):
        turn = row
        while alone.computed[row] < alone.lengths[row]:
            left = alone.lengths[row] - alone.computed[row]
            alone.step([row], [min([1, 60, 3][turn % 3], left)])
            turn += 1
    assert all(torch.equal(a, b) for a, b in zip(together.out, alone.out, strict=True))


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="known of the BLAS for AVX2 only")
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (32, 8)])
def test_chunks_and_single_tokens_give_the_same_bits(heads: tuple[int, int]):
    """float32 on a CPU: whole, in chunks, and token by token."""
    whole, chunked, single = (
        Sequences([2 * TILE + 60], heads=heads[0], kv_heads=heads[1], head_dim=64) for _ in range(3)
    )
    whole.run([1000])
    chunked.run([100, 7, FEW_TOKENS])
    single.run([1])
    assert torch.equal(whole.out[0], chunked.out[0])
    assert torch.equal(whole.out[0], single.out[0])


@pytest.mark.parametrize("at_a_time", [1, 2, 100])
def test_both_decode_bodies_agree(at_a_time: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.kernels.decode_attention.GATHERED", at_a_time * 208)
    sequences = Sequences([200, 31, 77])
    for row in range(3):
        sequences.step([row], [sequences.lengths[row]])
    keys, values = sequences.cache.keys[LAYER], sequences.cache.values[LAYER]
    lengths, q = np.array(sequences.lengths), torch.randn(3, 4, 16)
    bags = BagDecode(sequences.cache, 4, lengths, sequences.tables)(q, keys, values)
    gathered = GatherDecode(sequences.cache, lengths, sequences.tables)(q, keys, values)
    torch.testing.assert_close(bags, gathered, rtol=1e-5, atol=1e-6)


def test_batch_order_is_a_permutation_that_puts_like_to_like():
    starts = np.array([5, 0, 900, 3, 0, 70])
    counts = np.array([1, 300, 1, 2, 6, 1])
    assert batch_order(starts, counts).tolist() == [1, 4, 0, 3, 5, 2]


def test_bytes_per_token_is_what_the_pool_takes():
    cache = KVCache(3, 10, 16, 2, 8, torch.bfloat16)
    assert cache.keys.nbytes + cache.values.nbytes == 11 * 16 * bytes_per_token(3, 2, 8, torch.bfloat16)


def test_cpus_keep_float32():
    assert kv_dtype(torch.bfloat16, "cpu") == torch.float32
    assert kv_dtype(torch.bfloat16, "cuda") == torch.bfloat16
