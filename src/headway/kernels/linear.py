"""Linear layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """x [T, in] to [T, out] by a weight [out, in] and an optional bias [out]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def make_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer that computes in `dtype` on the weight's device."""
    return Linear(weight.to(dtype), None if bias is None else bias.to(dtype))
