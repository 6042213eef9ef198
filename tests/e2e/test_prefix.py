"""A known beginning is not computed again, and nobody can tell from the tokens: hit equals miss under churn."""

from __future__ import annotations

import random

import pytest
from tests.e2e.naive import Naive, compare
from tests.e2e.test_exactness import params_for

from headway import LLM


@pytest.fixture(scope="module")
def families(tiny_model_dir):
    """Three families of prompts; members of one share beginnings of different lengths."""
    draw = random.Random(5)
    trunks = [[draw.randrange(1000, 40000) for _ in range(90)] for _ in range(3)]
    prompts = [
        trunk[: draw.randrange(20, 90)] + [draw.randrange(1000, 40000) for _ in range(draw.randrange(0, 20))]
        for trunk in trunks
        for _ in range(10)
    ]
    draw.shuffle(prompts)
    params = params_for(prompts, 8)
    naive = Naive(tiny_model_dir)
    return prompts, params, [naive.decode(prompt, p) for prompt, p in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("tokens_in_pool", [4000, 330])
def test_hit_equals_miss(tiny_model_dir, families, tokens_in_pool):
    """The same prompts three times over, the first time cold; in the small pool blocks are forgotten all the time."""
    prompts, params, expected = families
    settings = {"dtype": "float32", "threads": 1, "max_batch_size": 6, "max_model_len": 128, "block_size": 8}
    with LLM(str(tiny_model_dir), kv_cache_memory=2 * 2 * 2 * 16 * 4 * tokens_in_pool, **settings) as llm:
        for _ in range(3):
            before = llm.stats()
            results = llm.generate(prompts, params, use_tqdm=False)
            for i, (truth, result) in enumerate(zip(expected, results, strict=True)):
                compare(f"request {i}", truth, result.outputs[0].token_ids)
        after = llm.stats()
    queries = after.num_prefix_queries - before.num_prefix_queries
    hits = after.num_prefix_hits - before.num_prefix_hits
    assert queries == sum(map(len, prompts)) or after.num_preemptions
    assert 0 < hits < queries
    if tokens_in_pool == 4000:
        assert hits >= sum((len(prompt) - 1) // 8 * 8 for prompt in prompts)  # all but the last block of each


def test_salted_requests_share_nothing():
    """Two requests with the same prompt and different salts: the second one finds nothing."""
    from tests.core.memory import World

    from headway.core.config import SchedulerConfig

    world = World(SchedulerConfig(max_batch_size=2, max_num_batched_tokens=32, depth=1), num_blocks=64)
    for handle, salt in enumerate(["a", "a", "b"]):
        world.add(3 * handle, prompt_len=17, max_tokens=2, cache_salt=salt)
        world.drain()
    assert [world.finished[3 * handle].cached_len for handle in range(3)] == [0, 16, 0]
