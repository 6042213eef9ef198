"""Sums over a row of the vocabulary, in float64 and in an order that neither threads nor other rows can change."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 256
"""Values that are added up at a time; then the sums of the chunks are, in order."""


def chunks(values: Tensor) -> Tensor:
    """values [n, V] as [n, chunks, CHUNK], filled up with zeros."""
    missing = -values.shape[1] % CHUNK
    return (functional.pad(values, (0, missing)) if missing else values).view(len(values), -1, CHUNK)


def chunk_sums(values: Tensor) -> Tensor:
    """float64 [n, chunks] of values [n, V]."""
    return chunks(values).sum(dim=-1, dtype=torch.float64)


def totals(values: Tensor) -> Tensor:
    """float64 [n] of values [n, V]."""
    return chunk_sums(values).cumsum(dim=-1)[:, -1]
