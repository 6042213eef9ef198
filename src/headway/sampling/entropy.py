"""Entropy of the likeliest next tokens: how sure a model is of how it begins says something of where it ends."""

from __future__ import annotations

import torch
from torch import Tensor

LIKELIEST = 20


def entropy_of_likeliest(logits: Tensor) -> Tensor:
    """float32 [n], in nats: -sum p log p over the LIKELIEST tokens of each row of logits float32 [n, V]."""
    top = logits.topk(min(LIKELIEST, logits.shape[-1]), dim=-1).values
    logprobs = top - torch.logsumexp(logits, dim=-1, keepdim=True)
    return -(logprobs.exp() * logprobs).sum(dim=-1)
