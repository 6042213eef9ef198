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


def logits(model: DecoderModel, token_ids: Sequence[int]) -> Tensor:
    """float32 [T, V]: those after every token of one sequence."""
    positions = torch.arange(len(token_ids))
    return model.forward(torch.tensor(token_ids), positions, ContiguousAttention(), positions)


def greedy(model: DecoderModel, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """The best tokens after the prompt, whatever they are, and by how much each one's logit leads the second best."""
    attend = ContiguousAttention()
    tokens, margins = [], []
    feed, start = list(prompt), 0
    for _ in range(num_tokens):
        positions = torch.arange(start, start + len(feed))
        last = torch.tensor([len(feed) - 1])
        best = model.forward(torch.tensor(feed), positions, attend, last)[0].topk(2)
        start += len(feed)
        feed = [int(best.indices[0])]
        tokens += feed
        margins.append(float(best.values[0] - best.values[1]))
    return tokens, margins
