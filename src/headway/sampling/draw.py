"""Drawing one token per row from filtered softmax probabilities, by one uniform number each.

Every filter is a threshold: a token stays where its weight exp((logit - best) / temperature), which is 1 for the best,
reaches it. So tokens of equal weight stay or go together, and the outcome hangs on values only, never on the order in
which some sort left ties. Weights are summed in float64 and in order of token ids, row by row: a row's draw is the same
whoever shares the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from headway.sampling.sums import CHUNK, chunk_sums, chunks, totals

CANDIDATES = 256
"""How many of a row's best tokens are sorted at first ..."""
WIDEN = 16
"""... and how many times as many, until they are enough."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What shapes the distribution of each of n rows: tensors [n], those of SamplingParams.

    temperature float32, positive. top_k int64, top_p float64, min_p float32; V, 1.0 and 0.0 of these filter nothing.
    Applied in vLLM's order: temperature, min_p, top_k, and top_p of what the others have left.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def rows(self, index: Tensor) -> Shape:
        return Shape(*(getattr(self, field.name)[index] for field in fields(self)))


def draw(logits: Tensor, best: Tensor, shape: Shape, uniforms: Tensor) -> Tensor:
    """int64 [n]: for each row of logits float32 [n, V] the token at which the distribution function passes its uniform.

    best float32 [n] is each row's largest logit; uniforms float64 [n] in (0, 1). Rows with NaN or infinity get some
    token, and disturb no other.
    """
    weights = (logits - best[:, None]).div_(shape.temperature[:, None]).exp_()
    _filter(weights, shape)
    return _invert(weights, uniforms)


def _filter(weights: Tensor, shape: Shape) -> None:
    """Sets to zero what the filters leave out."""
    vocab_size = weights.shape[1]
    sorts = (shape.top_k < vocab_size) | (shape.top_p < 1.0)
    floor = shape.min_p.clone()
    if sorts.any():
        index = torch.nonzero(sorts)[:, 0]
        some = weights if len(index) == len(weights) else weights[index]
        floor[index] = _floors(some, shape.rows(index), min(CANDIDATES, vocab_size))
    if (floor > 0).any():
        weights.masked_fill_(weights < floor[:, None], 0.0)


def _floors(weights: Tensor, shape: Shape, candidates: int) -> Tensor:
    """float32 [n]: the least weight that passes each row's filters, from its `candidates` best or, if need be, more."""
    best = weights.topk(candidates, dim=-1).values
    kth = best.gather(1, (shape.top_k.clamp(max=candidates) - 1)[:, None])
    floor = torch.where(shape.top_k < weights.shape[1], kth[:, 0], 0.0).maximum(shape.min_p)
    passing = weights.masked_fill(weights < floor[:, None], 0.0)
    wanted = shape.top_p * totals(passing)
    reached = best.masked_fill(best < floor[:, None], 0.0).double().cumsum(dim=-1)
    nucleus = torch.searchsorted(reached, wanted[:, None])
    last = best.gather(1, nucleus.clamp(max=candidates - 1))[:, 0]
    floor = torch.where(shape.top_p < 1.0, last, floor).maximum(floor)
    beyond = (shape.top_k > candidates) & (shape.top_k < weights.shape[1])
    beyond |= (nucleus[:, 0] == candidates) & (shape.top_p < 1.0)
    if candidates < weights.shape[1] and beyond.any():
        index = torch.nonzero(beyond)[:, 0]
        floor[index] = _floors(weights[index], shape.rows(index), min(WIDEN * candidates, weights.shape[1]))
    return floor


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The chunk of tokens in which each draw falls by the chunks' sums, then the token by walking through that one."""
    sums = chunk_sums(weights)
    reached = sums.cumsum(dim=-1)
    target = (uniforms * reached[:, -1])[:, None]
    chunk = torch.searchsorted(reached, target, right=True).minimum(_last_positive(sums))
    target = target - (reached - sums).gather(1, chunk)
    rows = torch.arange(len(weights), device=weights.device)
    inside = chunks(weights)[rows, chunk[:, 0]].double()
    token = torch.searchsorted(inside.cumsum(dim=-1), target, right=True).minimum(_last_positive(inside))
    return (chunk * CHUNK + token)[:, 0]


def _last_positive(values: Tensor) -> Tensor:
    """int64 [n, 1]: where rounding carries a draw past everything, it falls on the last that could be drawn."""
    return ((values > 0) * torch.arange(values.shape[1], device=values.device)).amax(dim=-1, keepdim=True)
