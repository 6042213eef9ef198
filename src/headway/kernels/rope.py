"""Rotary position embedding (Su et al. 2021): a table of angles, and its application to heads."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(inv_freq: Tensor, num_positions: int) -> Tensor:
    """float32 [num_positions, 2, D/2]: cosines and sines of position times inv_freq [D/2].

    Looked up rather than computed in each step, so that a position's angles never depend on its neighbours in a batch.
    """
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, H, D] rotated by the table's rows for its positions, angles [T, 2, D/2].

    Dimension i is paired with i + D/2, as in Hugging Face's layout. Computed in float32 and rounded once to x's dtype.
    """
    cos, sin = angles[:, None, 0], angles[:, None, 1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
