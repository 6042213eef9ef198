"""Naive decoding: one request alone, a dense cache, one token at a time. The truth that batching must not change."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


@dataclass
class Decoded:
    """Tokens, and the logits [V] that each was chosen from."""

    tokens: list[int]
    logits: list[Tensor]


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
        decoded = Decoded([], [])
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
            history = torch.zeros(1, len(tokens) + 1, dtype=torch.int64)
            history[0, : len(tokens)] = torch.tensor(tokens)
            sampled = sampler.sample(logits, np.array([0]), np.array([len(tokens)]), history)
            start = len(tokens)
            tokens.append(int(sampled.token_ids[0]))
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


def compare(name: str, expected: Decoded, tokens: Sequence[int]) -> int | None:
    """None where the tokens are equal; the position of a tie, which is printed, where they part at one.

    Raises:
        AssertionError: they part where the two candidates' logits are further apart than TIE.
    """
    for position, (ours, theirs) in enumerate(zip(tokens, expected.tokens, strict=True)):
        if ours != theirs:
            logits = expected.logits[position]
            gap = abs(float(logits[ours] - logits[theirs]))
            assert gap <= TIE, f"{name} differs at {position}: {ours} for {theirs}, logits {gap:.2e} apart"
            print(f"{name}: a tie at token {position}: {ours} and {theirs}, logits {gap:.2e} apart")
            return position
    return None
