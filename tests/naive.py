"""Decoding as plainly as it can be written: one request, contiguous keys and values, the whole softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.models.llama import DecoderModel


class ContiguousAttention:
    """An `attend` for one sequence whose tokens come in order."""

    def __init__(self) -> None:
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._kv:
            keys, values = self._kv[layer]
            k, v = torch.cat((keys, k)), torch.cat((values, v))
        self._kv[layer] = (k, v)
        groups = q.shape[1] // k.shape[1]
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("thd,lhd->htl", q, k.repeat_interleave(groups, 1)).float() * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(v.dtype)
        return torch.einsum("htl,lhd->thd", weights, v.repeat_interleave(groups, 1))


class RaggedAttention:
    """An `attend` for several sequences side by side; `counts` says how many tokens of each the step holds."""

    def __init__(self, num_sequences: int) -> None:
        self._each = [ContiguousAttention() for _ in range(num_sequences)]
        self.counts: list[int] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(self._each, *(x.split(self.counts) for x in (q, k, v)), strict=True)
        return torch.cat([attend(layer, *qkv) for attend, *qkv in parts])


def logits(model: DecoderModel, token_ids: Sequence[int]) -> Tensor:
    """float32 [T, V]: those after every token of one sequence."""
    positions = torch.arange(len(token_ids))
    return model.forward(torch.tensor(token_ids), positions, ContiguousAttention(), positions)


def greedy(
    model: DecoderModel, prompts: Sequence[Sequence[int]], num_tokens: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The best tokens after each prompt, whatever they are, and by how much each one's logit leads the second best."""
    attend = RaggedAttention(len(prompts))
    starts = [0] * len(prompts)
    feeds = [list(prompt) for prompt in prompts]
    tokens: list[list[int]] = [[] for _ in prompts]
    margins: list[list[float]] = [[] for _ in prompts]
    for _ in range(num_tokens):
        attend.counts = [len(feed) for feed in feeds]
        positions = torch.cat([torch.arange(s, s + len(feed)) for s, feed in zip(starts, feeds, strict=True)])
        last = torch.tensor(attend.counts).cumsum(0) - 1
        best = model.forward(torch.tensor([i for feed in feeds for i in feed]), positions, attend, last).topk(2)
        starts = [s + n for s, n in zip(starts, attend.counts, strict=True)]
        feeds = best.indices[:, :1].tolist()
        for i, feed in enumerate(feeds):
            tokens[i] += feed
            margins[i].append(float(best.values[i, 0] - best.values[i, 1]))
    return tokens, margins
