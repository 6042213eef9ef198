"""Naive decoding: one request alone, a dense cache, one token at a time. The truth that batching must not change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from headway.core.request import SamplingParams
from headway.models import load
from headway.sampling.sampler import Sampler

TIE = 1e-4
"""Logits that lie closer than this may come out in either order."""
TRIALS = 200


@dataclass
class Decoded:
    """Tokens, and the logits [V] that each was chosen from."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    logits: list[Tensor]


def decode_all(path: Path, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Decoded]:
    """Each prompt alone, on a thread that ends: OpenMP's threads that stay behind would slow an engine here down."""

    def decode() -> list[Decoded]:
        naive = Naive(path)
        return [naive.decode(prompt, p) for prompt, p in zip(prompts, params, strict=True)]

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(decode).result()


class Naive:
    def __init__(self, path: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = load(str(path), dtype, "cpu")
        self.config = self.model.config

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], params: SamplingParams) -> Decoded:
        """As many tokens as params.max_tokens, whatever they are."""
        keys: list[Tensor] = [torch.empty(0)] * self.config.num_layers
        values = list(keys)
        sampler = Sampler(1, self.config.vocab_size)
        sampler.admit(0, params, prompt_len=len(prompt))
        tokens = list(prompt)
        decoded = Decoded(list(prompt), params, [], [])
        start = 0
        while len(decoded.tokens) < (params.max_tokens or 0):
            new = torch.tensor(tokens[start:])
            positions = torch.arange(start, len(tokens))

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor = positions) -> Tensor:
                keys[layer] = torch.cat([keys[layer], k]) if len(keys[layer]) else k.clone()
                values[layer] = torch.cat([values[layer], v]) if len(values[layer]) else v.clone()
                return dense_attention(q, keys[layer], values[layer], positions)

            logits = self.model.forward(new, positions, attend, torch.tensor([len(new) - 1])).float()
            decoded.logits.append(logits[0].clone())
            start = len(tokens)
            tokens.append(choose(sampler, logits[0], tokens))
            decoded.tokens.append(tokens[-1])
        return decoded


def dense_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """q [T, H, D] over k, v [context, KV, D]; the i-th query sees positions 0 .. positions[i]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) / math.sqrt(q.shape[-1])
    unseen = torch.arange(len(k))[None, :] > positions[:, None]
    weights = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, v.float()).to(q.dtype)


def choose(sampler: Sampler, logits: Tensor, tokens: list[int]) -> int:
    """The token that follows `tokens`, of the sampler's only slot."""
    position = np.array([len(tokens)])
    return int(sampler.sample(logits[None].clone(), np.array([0]), position, torch.tensor([[*tokens, 0]])).token_ids[0])


def compare(name: str, expected: Decoded, tokens: Sequence[int]) -> int | None:
    """None where the tokens are equal; the position of a tie, which is printed, where they part at one.

    Raises:
        AssertionError: they part where it does not hang on less than TIE in the logits.
    """
    for position, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if ours != theirs:
            logits = expected.logits[position]
            gap = abs(float(logits[ours] - logits[theirs]))
            where = f"{name} at token {position}: {ours} for {theirs}, logits {gap:.2e} apart"
            if expected.params.greedy:
                assert gap <= TIE, where
            else:
                assert ours in _reachable(expected, position), where
            print(f"a tie in {where}")
            return position
    return None


def _reachable(expected: Decoded, position: int) -> set[int]:
    """The tokens that the same random number chooses when the logits change by no more than TIE."""
    sampler = Sampler(1, len(expected.logits[position]))
    sampler.admit(0, expected.params, prompt_len=len(expected.prompt))
    history = expected.prompt + expected.tokens[:position]
    noise = torch.Generator().manual_seed(position)
    logits = expected.logits[position]
    shifts = ((torch.rand(len(logits), generator=noise) * 2 - 1) * TIE for _ in range(TRIALS))
    return {choose(sampler, logits + shift, history) for shift in shifts}
