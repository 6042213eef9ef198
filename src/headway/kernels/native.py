"""The native CPU kernels of csrc/: whether they are here, and what they cannot do. Importing this imports no torch."""

from __future__ import annotations

from types import ModuleType

KINDS = ("float32", "bfloat16", "int8")
"""What weights may be packed as; keys and values are kept in float32 with the first and in bfloat16 with the others."""
LARGEST_HEAD_DIM = 256


def module() -> ModuleType | None:
    """The extension module, or None where it was not built."""
    try:
        from headway.kernels import _native
    except ImportError:
        return None
    return _native


def obstacle(device_type: str, kind: str, head_dim: int, block_size: int) -> str | None:
    """Why the native kernels cannot serve this, in a few words; None where they can. `kind` is one of KINDS."""
    if device_type != "cpu":
        return f"the device is {device_type}"
    if module() is None:
        return "they were not built (make setup builds them where it finds a C++ compiler)"
    if kind not in KINDS:
        return f"they know no {kind}"
    if head_dim % 16 or head_dim > LARGEST_HEAD_DIM:
        return f"head_dim {head_dim} is not a multiple of 16 up to {LARGEST_HEAD_DIM}"
    if block_size not in (16, 32) and block_size % 64:
        return f"block_size {block_size} is not 16, 32 or a multiple of 64"
    return None


def kept_bytes(kind: str, kernels: str, head_dim: int, block_size: int) -> int:
    """Of one number in a KV pool on a CPU; `kernels` is "auto", "native" or "torch", whose attention keeps float32."""
    native = kernels != "torch" and obstacle("cpu", kind, head_dim, block_size) is None
    return 2 if native and kind != "float32" else 4
