"""Linear layers: one callable per weight; the arithmetic follows from device, dtype and what the CPU can multiply.

On CPUs the weight is packed once into oneDNN's own layout. Measured on two AVX2 cores with the layers of a 135M model,
that halves the time of `torch.nn.functional.linear` at 1 to 32 rows; and each row's answer is the same to the bit
whatever the number of rows beside it, which the unpacked call does not give below four rows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

ONEDNN_OPS = ("_linear_pointwise", "_reorder_linear_weight")
CPUINFO = Path("/proc/cpuinfo")
BF16_FEATURES = {"avx512_bf16", "amx_bf16", "bf16"}
"""What Linux calls bfloat16 dot products: the first two on x86, the last on Arm."""
INTEL_BF16_FEATURES = {"amx_bf16"}
"""Intel's AVX512 ones are no faster than float32's: the layers of a 135M model took 66 ms against 51 at 32 rows."""


class Linear(Protocol):
    """y = x @ weight.T + bias. `nbytes` is what the layer keeps in memory."""

    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, in] in the layer's dtype -> [M, out] in the same."""
        ...


class TorchLinear:
    """torch's own: cuBLAS on a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN on a weight that has been packed for it; the plain copy is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # The packed layout suits any number of rows; 32 is a full batch's.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
        self._bias = bias
        self._out = weight.shape[0]
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, self._out)
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class WidenedLinear:
    """bfloat16 in and out, multiplied in float32: for CPUs that would otherwise emulate every bfloat16 product.

    The weight is rounded to bfloat16 all the same, so that the answer is as close to other machines' as it can be.
    """

    def __init__(self, inner: Linear) -> None:
        self._inner = inner
        self.nbytes = inner.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(x.float()).to(torch.bfloat16)


def make_linear(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """The layer of `weight` [out, in] and `bias` [out] for activations of `dtype`, on the weight's device."""
    weight = weight.detach().to(dtype)
    bias = None if bias is None else bias.detach().to(dtype)
    widen = dtype == torch.bfloat16 and _widens(weight.device)
    if widen:
        weight, bias = weight.float(), None if bias is None else bias.float()
    packs = weight.device.type == "cpu" and has_onednn()
    inner = PackedLinear(weight, bias) if packs else TorchLinear(weight, bias)
    return WidenedLinear(inner) if widen else inner


class Float32Head:
    """bfloat16 in, float32 out: logits that are rounded to bfloat16 tie, and the wrong one of two may win."""

    def __init__(self, inner: Linear) -> None:
        self._inner = inner
        self.nbytes = inner.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._inner(x.float())


def make_head(weight: Tensor, dtype: torch.dtype) -> Linear:
    """The layer that gives logits, in float32 wherever they are computed in float32 anyway. `weight` is [V, in]."""
    weight = weight.detach().to(dtype)
    if dtype == torch.bfloat16 and _widens(weight.device):
        return Float32Head(make_linear(weight.float(), None, torch.float32))
    return make_linear(weight, None, dtype)


def describe(device: torch.device | str, dtype: torch.dtype) -> str:
    """Which arithmetic `make_linear` chooses there, for a person to read."""
    device = torch.device(device)
    if device.type != "cpu":
        return f"torch {str(dtype).removeprefix('torch.')} on {device.type}"
    name = "oneDNN packed" if has_onednn() else "torch"
    if dtype == torch.bfloat16 and _widens(device):
        return f"{name} float32 on weights rounded to bfloat16 (this CPU has no fast bfloat16 arithmetic)"
    return f"{name} {str(dtype).removeprefix('torch.')}"


def _widens(device: torch.device) -> bool:
    return device.type == "cpu" and not (has_native_bf16() and has_onednn())


@cache
def has_native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32. Where that cannot be read, it is taken not to."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "").split()
    intel = any(line.startswith("vendor_id") and line.endswith("GenuineIntel") for line in lines)
    return not (INTEL_BF16_FEATURES if intel else BF16_FEATURES).isdisjoint(features)


@cache
def has_onednn() -> bool:
    """Whether this build of torch has oneDNN's packed linear layers."""
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, op) for op in ONEDNN_OPS)
