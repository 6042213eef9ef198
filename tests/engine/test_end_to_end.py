"""With a real model (tiny, random, float32): both engines give the model's own greedy tokens, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from headway import LLM, SamplingParams
from headway.engine.api import Delta, Engine, EngineDead, Stream

SETTINGS = {"dtype": "float32", "kv_cache_memory": 16 << 20, "threads": 1, "max_batch_size": 8}
PROMPTS = ["Once upon a time", "The headway between two trains", "1, 2, 3,", "naïve café 👩‍🚀", "x"] * 3
on_the_engines_loop = pytest.mark.asyncio(loop_scope="module")
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def greedy_tokens(tiny_model_dir: Path) -> dict[str, list[int]]:
    """Each prompt's continuation, computed alone by transformers without a KV cache of ours."""
    import torch
    from transformers import AutoModelForCausalLM

    from headway.engine.text import Tokenizer

    torch.set_num_threads(1)
    tokenizer = Tokenizer.load(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    answers = {}
    for prompt in dict.fromkeys(PROMPTS):
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers[prompt] = out[0, ids.shape[1] :].tolist()
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model_dir: Path) -> AsyncIterator[Engine]:
    async with await Engine.start(str(tiny_model_dir), **SETTINGS) as engine:
        yield engine


def merged(deltas: list[Delta]) -> tuple[str, list[int]]:
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids]


def test_llm_gives_the_models_tokens(tiny_model_dir: Path, greedy_tokens: dict[str, list[int]]) -> None:
    with LLM(str(tiny_model_dir), **SETTINGS) as llm:
        completions = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [c.outputs[0].token_ids for c in completions] == [greedy_tokens[prompt] for prompt in PROMPTS]
        assert llm._loop.stats().kv_usage == 0


@on_the_engines_loop
async def test_streams_give_the_models_tokens(engine: Engine, greedy_tokens: dict[str, list[int]]) -> None:
    async def read(stream: Stream) -> list[Delta]:
        return [delta async for delta in stream]

    streams = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
    answers = [merged(deltas) for deltas in await asyncio.gather(*map(read, streams))]
    expected = [greedy_tokens[prompt] for prompt in PROMPTS]
    assert answers == [(engine.tokenizer.decode(ids), ids) for ids in expected]


@on_the_engines_loop
async def test_a_stop_string_cuts_the_models_text(engine: Engine, greedy_tokens: dict[str, list[int]]) -> None:
    prompt = PROMPTS[0]
    text = engine.tokenizer.decode(greedy_tokens[prompt])
    stop = text[len(text) // 2 : len(text) // 2 + 3]  # wherever the tokens' borders are
    (delta,) = await engine.generate(prompt, SamplingParams(temperature=0, max_tokens=24, stop=stop)).collect()
    assert delta.text == text[: text.index(stop)]
    assert delta.stop_reason == stop


@on_the_engines_loop
async def test_seeded_samples_are_the_same_in_both_engines(engine: Engine, tiny_model_dir: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=16, seed=11, n=2, logprobs=2)
    deltas = await engine.generate(PROMPTS[0], params).collect()
    with LLM(str(tiny_model_dir), **SETTINGS) as llm:
        (completion,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [d.token_ids for d in deltas] == [o.token_ids for o in completion.outputs]
    assert deltas[0].token_ids != deltas[1].token_ids
    assert [d.logprobs for d in deltas] == [o.logprobs for o in completion.outputs]


@on_the_engines_loop
async def test_closing_a_hundred_streams_in_midstream_returns_every_block(engine: Engine) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    streams = [engine.generate([7 + i] * 40, params) for i in range(100)]
    await anext(streams[0])
    for stream in streams:
        await stream.aclose()
    aborted = await engine.ping()
    assert aborted.num_running + aborted.num_waiting == 0
    while (stats := await engine.ping()).kv_usage:
        assert stats.num_steps - aborted.num_steps < engine.config.scheduler.depth
    assert stats.num_steps - aborted.num_steps <= engine.config.scheduler.depth
    assert len((await engine.generate("x", GREEDY).collect())[0].token_ids) == 24


async def test_a_pool_that_is_too_small_is_one_clear_line(tiny_model_dir: Path) -> None:
    with pytest.raises(EngineDead) as caught:
        await Engine.start(str(tiny_model_dir), **SETTINGS | {"kv_cache_memory": 1000})
    assert "\n" not in str(caught.value)
    assert "KV" in str(caught.value)


async def test_a_damaged_model_is_one_clear_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    for file in tiny_model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(EngineDead, match=r"model\.safetensors") as caught:
        await Engine.start(str(tmp_path), **SETTINGS)
    assert "\n" not in str(caught.value)
