"""The native CPU kernels of csrc/: whether they are here, which of them this processor runs, and what they cannot do."""

from __future__ import annotations

from types import ModuleType

import torch

HEAD_DIMS = range(16, 257, 16)
BLOCK_SIZES = "16, 32 or a multiple of 64"


def module() -> ModuleType | None:
    """The extension module, or None where it was not built."""
    try:
        from headway.kernels import _native
    except ImportError:
        return None
    return _native


def obstacle(device: torch.device | str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why the native kernels cannot serve this, in a few words; None where they can."""
    if torch.device(device).type != "cpu":
        return f"the device is {torch.device(device).type}"
    if module() is None:
        return "they were not built (make setup builds them where it finds a C++ compiler)"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"they compute in float32 and bfloat16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not a multiple of 16 up to 256"
    if block_size not in (16, 32) and block_size % 64:
        return f"block_size {block_size} is not {BLOCK_SIZES}"
    return None
