"""The server on the real engine with a tiny random model: nothing here is scripted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from headway.engine.startup import BUILD_LOOP
from tests.server.conftest import MODEL, running

PROMPT = "The metro of Vienna"
MESSAGES = [{"role": "user", "content": "Where does it go?"}]


@pytest.fixture(scope="module")
def openai(tiny_model_dir: Path) -> Iterator[OpenAI]:
    with (
        running(tiny_model_dir, factory=BUILD_LOOP) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def completion(openai: OpenAI, **body: object) -> list[str]:
    arguments = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "extra_body": {"ignore_eos": True}} | body
    return [choice.text for choice in openai.completions.create(**arguments).choices]


def test_greedy_answers_are_those_of_transformers(openai: OpenAI, tiny_model_dir: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        ids = model.generate(prompt, do_sample=False, max_new_tokens=24, min_new_tokens=24, pad_token_id=0)[0]
    answer = openai.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.choices[0].token_ids == ids[prompt.shape[1] :].tolist()


def test_seed_fixes_the_answer(openai: OpenAI) -> None:
    one, again, other = (completion(openai, seed=seed)[0] for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert completion(openai)[0] != completion(openai)[0]


def test_choices_differ_and_do_not_depend_on_their_number(openai: OpenAI) -> None:
    three = completion(openai, seed=5, n=3)
    assert len(set(three)) == 3
    assert completion(openai, seed=5, n=2) == three[:2]


def test_streamed_equals_whole(openai: OpenAI) -> None:
    chat = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "seed": 3}
    whole = openai.chat.completions.create(**chat).choices[0].message.content
    chunks = openai.chat.completions.create(**chat, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert (
        "".join(
            chunk.choices[0].text
            for chunk in openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, seed=3, stream=True)
        )
        == openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, seed=3).choices[0].text
    )


def test_answers_in_company_equal_those_alone(openai: OpenAI) -> None:
    prompts = [f"Line {i} goes to" for i in range(8)]
    together = completion(openai, prompt=prompts, temperature=0)
    assert together == [completion(openai, prompt=prompt, temperature=0)[0] for prompt in prompts]


def test_stop_string_cuts_the_same_answer(openai: OpenAI) -> None:
    whole = completion(openai, seed=4, max_tokens=60)[0]
    middle = whole[len(whole) // 2 :][:3]
    assert completion(openai, seed=4, max_tokens=60, stop=middle)[0] == whole[: whole.index(middle)]


def test_logprobs_are_of_the_tokens_that_were_chosen(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=20, temperature=0, logprobs=True, top_logprobs=4
    )
    for entry in answer.choices[0].logprobs.content:
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == best[0] <= 0
