"""The embedded model against transformers' reading of the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from headway.engine.text import Tokenizer
from headway.models import load
from headway.models.llama import DecoderModel
from tests import naive
from tests.texts import sharegpt


@pytest.fixture(scope="module")
def model(embedded_gguf: Path) -> DecoderModel:
    return load(embedded_gguf, torch.float32)


def assert_greedy_equal(
    model: DecoderModel, reference_model: PreTrainedModel, tokenizer: Tokenizer, count: int, length: int
) -> None:
    """If after the prompt and any number of our tokens transformers' best token is our next one, then its greedy answer
    is ours. A difference counts only where the two best logits are apart."""
    prompts = [
        tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": text}]), add_special_tokens=False)[
            :128
        ]
        for text in sharegpt(count)
    ]
    for prompt, tokens, margins in zip(prompts, *naive.greedy(model, prompts, length), strict=True):
        with torch.inference_mode():
            best = reference_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        for i, (ours, theirs) in enumerate(zip(tokens, best.tolist(), strict=True)):
            if ours != theirs:
                assert margins[i] < 1e-4, f"token {i}: {ours} instead of {theirs}, leading by {margins[i]}"
                print(f"token {i} differs, where the two best logits are within {margins[i]:.1e}")


def test_greedy_tokens_equal_those_of_transformers(model, reference_model, tokenizer):
    assert_greedy_equal(model, reference_model, tokenizer, count=3, length=16)


@pytest.mark.slow
def test_greedy_tokens_equal_those_of_transformers_at_length(model, reference_model, tokenizer):
    assert_greedy_equal(model, reference_model, tokenizer, count=20, length=64)


def test_a_gguf_equals_its_dequantised_twin(model, reference_model, tokenizer, tmp_path):
    reference_model.save_pretrained(tmp_path)
    twin = load(tmp_path, torch.float32)
    prompt = tokenizer.encode("Nobody expects the Spanish Inquisition!")
    assert torch.equal(naive.logits(model, prompt), naive.logits(twin, prompt))


def test_the_memory_that_the_weights_take(model):
    """134.5 M weights, the tied matrix twice (as the embedding and packed as the head), and the table of angles."""
    assert model.nbytes == pytest.approx(4 * (106.2e6 + 2 * 28.3e6) + 8192 * 64 * 4, rel=2e-3)


def test_bfloat16_stays_near_float32(model, embedded_gguf, tokenizer):
    prompt = tokenizer.encode("The capital of France is")
    exact = naive.logits(model, prompt)[-1]
    rounded = naive.logits(load(embedded_gguf, torch.bfloat16), prompt)[-1]
    assert rounded.dtype == torch.float32
    assert int(rounded.argmax()) == int(exact.argmax())
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max()
