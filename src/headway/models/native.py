"""The Llama architecture on the native kernels: a step is one call, in which all layers are computed."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.kernels.kv_cache import KVCache
from headway.kernels.native import module
from headway.models.config import ModelConfig
from headway.models.llama import position_angles
from headway.models.weights import Weights

Longs = npt.NDArray[np.int64]

FEW_ROWS = 4
"""Up to so many rows a step is bound by reading the weights."""
WORTH = 1.25
"""How many times as fast a step of few rows must be with all threads for them to be used."""
TRIALS = 3


class NativeDecoder:
    """A Llama-architecture decoder on a CPU. `weights` are packed as float32, bfloat16 or int8 while they are read.

    Sums are float32 (int8: whole numbers), and so is what runs from layer to layer. `isa` names the instruction set of
    the kernels: the best one that this processor has, unless asked for another. `nbytes` is what the packed weights
    take in memory.
    """

    def __init__(self, config: ModelConfig, weights: Weights, kind: str, threads: int, *, isa: str = "") -> None:
        native = module()
        if native is None:
            raise RuntimeError("the native kernels were not built")
        self._native = native
        self.config = config
        self.device = torch.device("cpu")
        self.pool = native.Pool(threads)
        self._model = native.Model(
            self.pool,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.vocab_size,
            config.rms_norm_eps,
            kind,
            isa,
        )
        self.isa: str = self._model.isa
        read = _Reader(config, weights)
        for layer in range(config.num_layers):
            self._model.add_layer(*read.layer(layer))
        embedding = read.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        head = embedding if tied else read.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        norm = read.tensor("model.norm.weight", config.hidden_size)
        self._model.add_ends(embedding, norm, head, position_angles(config, weights))
        self.nbytes: int = self._model.nbytes

    def bind(self, cache: KVCache) -> None:
        """Keys and values are kept in `cache` from now on, in an order inside a block that only the kernels know."""
        self._model.bind(cache.keys, cache.values)

    def settle(self, null_block: int) -> None:
        """Finds out whether help is worth having for few rows, which memory bounds rather than arithmetic.

        Where other threads bring little, they would only take cores from the server that streams the answers.
        """
        if self.pool.threads == 1:
            return
        one, zero, table = torch.zeros(1, dtype=torch.int64), np.zeros(1, np.int64), np.full((1, 1), null_block)

        def seconds(alone_up_to: int) -> float:
            self._model.alone_up_to = alone_up_to
            start = time.perf_counter()
            self.step(one, zero, zero + 1, table, zero)
            return time.perf_counter() - start

        seconds(0)
        helped, alone = (min(seconds(rows) for _ in range(TRIALS)) for rows in (0, FEW_ROWS))
        self._model.alone_up_to = FEW_ROWS if alone < WORTH * helped else 0

    def step(
        self,
        token_ids: Tensor,
        starts: Longs,
        num_tokens: Longs,
        tables: Longs,
        sampling: Longs,
        logits: Tensor | None = None,
    ) -> Tensor:
        """float32 logits [S, V] of the tokens in `sampling` int64 [S], in `logits` if that is given.

        token_ids int64 [T], row after row: row i computes positions [starts[i], starts[i] + num_tokens[i]) of the
        sequence in the blocks tables[i].
        """
        if logits is None:
            logits = torch.empty(len(sampling), self.config.vocab_size)
        self._model.step(token_ids, starts, num_tokens, tables, sampling, logits)
        return logits

    def attend(self, starts: Longs, num_tokens: Longs, tables: Longs) -> None:
        """The attention of all layers by itself, whatever it reads: to measure it."""
        self._model.attend(starts, num_tokens, tables)

    def best_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each row's largest logit float32 [n], NaN where there is one, and its first place int64 [n]."""
        best, index = torch.empty(len(logits)), torch.empty(len(logits), dtype=torch.int64)
        self._native.argmax(self.pool, self.isa, logits, best, index)
        return best, index


class _Reader:
    """A checkpoint's tensors as the kernels take them: float32, modules that read the same input side by side."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights

    def tensor(self, name: str, *shape: int) -> Tensor:
        return self._weights.get(name, *shape).float().contiguous()

    def layer(self, index: int) -> tuple[Tensor | None, ...]:
        """In the order of the kernels' add_layer."""
        config, prefix = self._config, f"model.layers.{index}"
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = {f"{attention}.q_proj": query, f"{attention}.k_proj": key, f"{attention}.v_proj": key}
        return (
            self.tensor(f"{prefix}.input_layernorm.weight", hidden),
            *self._linear(qkv, hidden, config.attention_bias),
            *self._linear({f"{attention}.o_proj": hidden}, query, config.attention_output_bias),
            self.tensor(f"{prefix}.post_attention_layernorm.weight", hidden),
            *self._linear({f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, config.mlp_bias),
            *self._linear({f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
        )

    def _linear(self, outputs: dict[str, int], inputs: int, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([self.tensor(f"{name}.weight", rows, inputs) for name, rows in outputs.items()])
        if not bias:
            return weight, None
        return weight, torch.cat([self.tensor(f"{name}.bias", rows) for name, rows in outputs.items()])
