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


def rope_angles(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The table's rows for positions int64 [T], as `apply_rope` takes them: cosines and signed sines [T, 1, D]."""
    cos, sin = table[positions].unsqueeze(2).unbind(1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, H, D] rotated by `rope_angles` of its positions, in float32 and rounded once to x's dtype.

    Dimension i is paired with i + D/2, as in Hugging Face's layout.
    """
    wide = x.float()
    return (wide * cos + wide.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)
