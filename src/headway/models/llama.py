"""The Llama architecture as one ragged forward pass: every row of the step is a token, whichever request it is of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headway.kernels.linear import Linear, make_head, make_linear
from headway.kernels.norm import rms_norm
from headway.kernels.rope import apply_rope, rope_angles, rope_table
from headway.models.config import LinearRope, Llama3Rope, ModelConfig
from headway.models.weights import Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attend(layer, q [T, H, D], k [T, KV, D], v [T, KV, D]) -> [T, H, D]: stores k and v and attends causally, scaled by
1/sqrt(D). q, k and v may be views into one larger tensor."""

Angles = tuple[Tensor, Tensor]
"""What rope_angles returns for the positions of the step."""


class DecoderModel:
    """A Llama-architecture decoder. It keeps no state of any sequence: that is `attend`'s.

    `nbytes` is what its weights take in memory, packed as they are.
    """

    def __init__(self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device | str) -> None:
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        load = _Loader(config, weights, dtype, self.device)
        self._embedding = load.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = [_Layer(config, i, load) for i in range(config.num_layers)]
        self._norm = load.tensor("model.norm.weight", config.hidden_size)
        tied = config.tie_word_embeddings
        head = self._embedding if tied else load.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = make_head(head, dtype)
        self._rope = position_angles(config, weights).to(self.device)
        parts = (self._embedding, self._norm, self._head, self._rope, *self._layers)
        self.nbytes = sum(part.nbytes for part in parts)

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, sample_index: Tensor) -> Tensor:
        """float32 logits [S, V] of the rows in sample_index int64 [S].

        `token_ids` int64 [T] and their `positions` int64 [T], each less than max_position_embeddings, are the tokens
        of the step in any order; which belong together only `attend` knows.
        """
        x = functional.embedding(token_ids, self._embedding)
        angles = rope_angles(self._rope, positions)
        for layer in self._layers:
            x = layer(x, angles, attend)
        x = rms_norm(x[sample_index], self._norm, self.config.rms_norm_eps)
        return self._head(x).float()


class _Layer:
    """Attention and a gated feed-forward network, each on the normalised input and added to it."""

    def __init__(self, config: ModelConfig, index: int, load: _Loader) -> None:
        prefix = f"model.layers.{index}"
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self._index = index
        self._eps = config.rms_norm_eps
        self._head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self._input_norm = load.tensor(f"{prefix}.input_layernorm.weight", hidden)
        self._qkv = load.linear(
            {f"{attention}.q_proj": query, f"{attention}.k_proj": key, f"{attention}.v_proj": key},
            hidden,
            bias=config.attention_bias,
        )
        self._output = load.linear({f"{attention}.o_proj": hidden}, query, bias=config.attention_output_bias)
        self._post_attention_norm = load.tensor(f"{prefix}.post_attention_layernorm.weight", hidden)
        self._gate_up = load.linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, bias=config.mlp_bias)
        self._down = load.linear({f"{mlp}.down_proj": hidden}, inner, bias=config.mlp_bias)
        norms = (self._input_norm, self._post_attention_norm)
        self.nbytes = sum(part.nbytes for part in (*norms, self._qkv, self._output, self._gate_up, self._down))

    def __call__(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        x = x + self._attention(rms_norm(x, self._input_norm, self._eps), angles, attend)
        gate, up = self._gate_up(rms_norm(x, self._post_attention_norm, self._eps)).chunk(2, dim=-1)
        return x + self._down(functional.silu(gate) * up)

    def _attention(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        heads, kv_heads, _ = self._head_counts
        qkv = self._qkv(x).unflatten(-1, (sum(self._head_counts), -1))
        query_key, value = qkv.split((heads + kv_heads, kv_heads), dim=1)
        query, key = apply_rope(query_key, *angles).split((heads, kv_heads), dim=1)
        return self._output(attend(self._index, query, key, value).flatten(1))


@dataclass(frozen=True, slots=True)
class _Loader:
    """Reads the layers' tensors in the dtype and to the device where they will be used."""

    config: ModelConfig
    weights: Weights
    dtype: torch.dtype
    device: torch.device

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self.weights.get(name, *shape).to(self.device, self.dtype)

    def linear(self, outputs: dict[str, int], inputs: int, *, bias: bool) -> Linear:
        """One layer for several modules of the checkpoint that read the same input; `outputs` gives each one's rows."""
        weight = torch.cat([self.tensor(f"{name}.weight", rows, inputs) for name, rows in outputs.items()])
        biases = [self.tensor(f"{name}.bias", rows) for name, rows in outputs.items()] if bias else []
        return make_linear(weight, torch.cat(biases) if biases else None, self.dtype)


def position_angles(config: ModelConfig, weights: Weights) -> Tensor:
    """float32 [max_position_embeddings, 2, D/2]: the model's `rope_table`, with the factors that its file may carry."""
    inv_freq = inverse_frequencies(config)
    if "rope_freqs.weight" in weights:
        inv_freq = inv_freq / weights.get("rope_freqs.weight", config.head_dim // 2)
    return rope_table(inv_freq, config.max_position_embeddings)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float32 [D/2]: the angle, in radians, by which each pair of a head's dimensions turns per position."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    match config.rope_scaling:
        case LinearRope(factor):
            return inv_freq / factor
        case Llama3Rope(factor, low, high, original):
            wavelength = 2 * math.pi / inv_freq
            smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
            return (1 - smooth) * inv_freq / factor + smooth * inv_freq
    return inv_freq
