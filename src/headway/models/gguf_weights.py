"""Weights from a GGUF file, dequantised and laid out as Hugging Face lays them out."""

from __future__ import annotations

import re

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from headway.models.config import ModelConfig
from headway.models.gguf import GgufFile
from headway.models.weights import Weights

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "rope_freqs": "rope_freqs",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NAME = re.compile(r"(?:model\.layers\.(\d+)\.)?(.+)\.(weight|bias)")


class GgufWeights(Weights):
    """The tensors of a GGUF file in float32. Besides Hugging Face's names it answers to `rope_freqs.weight`."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.source = file.path
        self._file = file
        self._heads = {"self_attn.q_proj": config.num_heads, "self_attn.k_proj": config.num_kv_heads}

    def __contains__(self, name: str) -> bool:
        return self._name(name)[0] in self._file.tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._name(name)[0]].shape

    def _read(self, name: str) -> Tensor:
        stored_name, module = self._name(name)
        stored = self._file.tensors[stored_name]
        rows = self._file.data(stored).reshape(*stored.shape[:-1], -1)
        values = dequantize(rows, GGMLQuantizationType(stored.type_id))
        tensor = torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(stored.shape)
        return _undo_permutation(tensor, self._heads[module]) if module in self._heads else tensor

    def _name(self, name: str) -> tuple[str, str]:
        """The file's name for a tensor, and the module that it belongs to."""
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in _NAMES:
            return "", ""
        layer, module, kind = match.groups()
        prefix = f"blk.{layer}." if layer else ""
        return f"{prefix}{_NAMES[module]}.{kind}", module


def _undo_permutation(tensor: Tensor, heads: int) -> Tensor:
    """llama.cpp rotates neighbouring pairs and orders the rows of q and k so; here pairs are half a head apart."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
