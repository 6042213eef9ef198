"""Whoever shares the step, however prompts are cut, whoever is preempted: the tokens are those of one request alone."""

from __future__ import annotations

import random
from itertools import product

import pytest
from tests.e2e.naive import compare, decode_all

from headway import LLM, SamplingParams
from headway.lab.workload import sharegpt

SETTINGS = list(product([True, False], [False, True], [1, 2]))
IDS = [
    f"{'chunked' if chunked else 'whole'}-{'small' if small else 'ample'} pool-depth {depth}"
    for chunked, small, depth in SETTINGS
]


def params_for(prompts, max_tokens: int) -> list[SamplingParams]:
    """Every other one greedy, the others sampled with seeds in different ways."""
    shapes = [{}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 0.7, "min_p": 0.05}]
    return [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        if i % 2 == 0
        else SamplingParams(max_tokens=max_tokens, ignore_eos=True, **({"seed": i} | shapes[i // 2 % len(shapes)]))
        for i in range(len(prompts))
    ]


def check_engine(path, prompts, params, expected, **settings) -> None:
    small = settings.pop("small")
    with LLM(str(path), dtype="float32", block_size=16, threads=settings.pop("threads", None), **settings) as llm:
        results = llm.generate(prompts, params, use_tqdm=False)
        preemptions = llm.stats().num_preemptions
    assert (preemptions > 0) == small, f"{preemptions} preemptions"
    parted = [
        compare(f"request {i}", truth, result.outputs[0].token_ids)
        for i, (truth, result) in enumerate(zip(expected, results, strict=True))
    ]
    print(f"{len(prompts)} requests, {sum(p is not None for p in parted)} parted at a tie, {preemptions} preemptions")


@pytest.fixture(scope="module")
def tiny_case(tiny_model_dir):
    draw = random.Random(0)
    prompts = [[draw.randrange(1000, 40000) for _ in range(draw.randrange(1, 60))] for _ in range(24)]
    params = params_for(prompts, 16)
    return prompts, params, decode_all(tiny_model_dir, prompts, params)


@pytest.mark.parametrize(("chunked", "small", "depth"), SETTINGS, ids=IDS)
def test_tiny_model(tiny_model_dir, tiny_case, chunked, small, depth):
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    check_engine(
        tiny_model_dir,
        *tiny_case,
        chunked_prefill=chunked,
        small=small,
        depth=depth,
        max_batch_size=8,
        max_num_batched_tokens=40 if chunked else 64,
        max_model_len=80,
        kv_cache_memory=bytes_per_token * (112 if small else 1600),
        threads=1,
    )


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_whether_it_is_computed_again_or_swapped(tiny_model_dir, tiny_case, preemption, prefix_caching):
    bytes_per_token = 2 * 2 * 2 * 16 * 4
    check_engine(
        tiny_model_dir,
        *tiny_case,
        preemption=preemption,
        prefix_caching=prefix_caching,
        small=True,
        max_batch_size=8,
        max_num_batched_tokens=40,
        max_model_len=80,
        kv_cache_memory=bytes_per_token * 112,
        swap_space=bytes_per_token * 160,
        threads=1,
    )


@pytest.fixture(scope="module")
def embedded_case(embedded_gguf, tokenizer):
    prompts = [tokenizer.encode(item.prompt) for item in sharegpt(64, tokenizer, seed=3, max_prompt=400)]
    params = params_for(prompts, 64)
    return prompts, params, decode_all(embedded_gguf, prompts, params)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("chunked", "small", "depth"), SETTINGS, ids=IDS)
def test_embedded_model_at_concurrency_32(embedded_gguf, embedded_case, chunked, small, depth):
    bytes_per_token = 30 * 2 * 3 * 64 * 4
    check_engine(
        embedded_gguf,
        *embedded_case,
        chunked_prefill=chunked,
        small=small,
        depth=depth,
        max_batch_size=32,
        max_num_batched_tokens=256,
        max_model_len=512,
        kv_cache_memory=bytes_per_token * (1800 if small else 32 * 512),
    )
