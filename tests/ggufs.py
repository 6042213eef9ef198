"""Small GGUF files, written by the gguf package as llama.cpp's converter lays them out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 64, 96, 2, 4, 2, 320


def llama_tensors(*, tied: bool = True, bias: bool = False) -> dict[str, np.ndarray]:
    """Random weights of a tiny Llama by their names in a GGUF."""
    random = np.random.default_rng(3)
    key = HIDDEN // HEADS * KV_HEADS
    rows = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (key, HIDDEN),
        "attn_v": (key, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in rows.items()}
        shapes |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        if bias:
            shapes |= {f"blk.{layer}.{name}.bias": shape[:1] for name, shape in rows.items()}
    return {name: random.normal(0, shape[-1] ** -0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any] | None = None,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> Path:
    """A GGUF whose matrices are stored as `kind` and vectors as F32; `metadata` adds or replaces keys."""
    values: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 256,
        f"{architecture}.embedding_length": HIDDEN,
        f"{architecture}.feed_forward_length": INNER,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": HIDDEN // HEADS,
        f"{architecture}.vocab_size": VOCABULARY,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        **(metadata or {}),
    }
    writer = GGUFWriter(path, architecture)
    if alignment := values.pop("general.alignment", None):
        writer.add_custom_alignment(alignment)
    for key, value in values.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
