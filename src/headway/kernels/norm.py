"""Root mean square layer normalisation (Zhang and Sennrich 2019)."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, H] scaled to unit root mean square, times weight [H]: in float32, rounded once to x's dtype."""
    return functional.rms_norm(x, weight.shape, weight, eps)
