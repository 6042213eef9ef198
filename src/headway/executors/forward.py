"""The forward pass of a step as the executor sees it: a model with its KV pool, on torch or on the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from headway import models
from headway.core.errors import ModelError
from headway.executors.config import ExecutorConfig
from headway.executors.layout import Layout
from headway.kernels import linear, native
from headway.kernels.attention import AttentionPlan
from headway.kernels.kv_cache import KVCache, kv_dtype
from headway.models.config import ModelConfig
from headway.models.llama import DecoderModel
from headway.models.native import NativeDecoder
from headway.sampling.sampler import BestOf


class Forward(Protocol):
    """A model and its pool.

    `config`, `device` and `nbytes` are the model's; `kept` is what keys and values are kept in; `arithmetic` says for a
    person what computes. `best_of` finds the largest logits, if it can do so better than torch.
    """

    config: ModelConfig
    device: torch.device
    nbytes: int
    kept: torch.dtype
    arithmetic: str
    best_of: BestOf | None

    def bind(self, cache: KVCache) -> None:
        """Keeps keys and values there from now on."""
        ...

    def prepare(self, step: Layout) -> Callable[[Tensor], Tensor]:
        """What the host has to do for a step. The result computes it: token_ids int64 [T] -> float32 logits [S, V]."""
        ...


class TorchForward:
    def __init__(self, model: DecoderModel) -> None:
        self._model = model
        self.config, self.device, self.nbytes = model.config, model.device, model.nbytes
        self.kept = kv_dtype(model.dtype, model.device)
        self.arithmetic = linear.describe(model.device, model.dtype)
        self.best_of = None

    def bind(self, cache: KVCache) -> None:
        self._cache = cache

    def prepare(self, step: Layout) -> Callable[[Tensor], Tensor]:
        plan = AttentionPlan(self._cache, self.config.num_heads, step.starts, step.num_tokens, step.tables)

        def compute(token_ids: Tensor) -> Tensor:
            positions, sampling = (torch.from_numpy(x).to(self.device) for x in (step.positions, step.sampling))
            return self._model.forward(token_ids, positions, plan.attend, sampling)

        return compute


class NativeForward:
    def __init__(self, model: NativeDecoder, kind: str) -> None:
        self._model = model
        self.config, self.device, self.nbytes = model.config, model.device, model.nbytes
        self.kept = torch.float32 if kind == "float32" else torch.bfloat16
        self.arithmetic = f"native {kind} ({model.isa} kernels)"
        self.best_of: BestOf | None = model.best_of
        self._logits = torch.empty(0, model.config.vocab_size)

    def bind(self, cache: KVCache) -> None:
        self._model.bind(cache)
        self._model.settle(cache.null_block)

    def prepare(self, step: Layout) -> Callable[[Tensor], Tensor]:
        tables, rows = np.ascontiguousarray(step.tables), len(step.sampling)
        if rows > len(self._logits):
            self._logits = torch.empty(max(rows, 2 * len(self._logits)), self.config.vocab_size)
        logits = self._logits[:rows]  # the same memory in every step: fresh pages would cost milliseconds
        return lambda tokens: self._model.step(tokens, step.starts, step.num_tokens, tables, step.sampling, logits)


def make_forward(
    config: ExecutorConfig, dtype: torch.dtype, device: torch.device, threads: int, report: Callable[[str], None]
) -> Forward:
    """The model of `config`, on the native kernels where they serve it, else on torch, as `report` is told.

    Raises:
        ModelError: it cannot be read, or native kernels were demanded and cannot serve it.
    """
    kind = config.quantization or str(dtype).removeprefix("torch.")
    if kind == "int8" and config.dtype == "float32":
        raise ModelError("int8 weights go with bfloat16 keys and values: leave out --dtype float32")
    shape, weights = models.open_model(config.model)
    obstacle = "torch's were asked for" if config.kernels == "torch" else None
    obstacle = obstacle or native.obstacle(device.type, kind, shape.head_dim, config.block_size)
    if obstacle is None:
        torch.set_num_threads(1)  # its threads would take the cores from the pool's
        return NativeForward(NativeDecoder(shape, weights, kind, threads), kind)
    if config.kernels == "native":
        raise ModelError(f"--kernels native cannot serve this: {obstacle}")
    if kind == "int8":
        raise ModelError(f"--quantization int8 needs the native kernels, and they cannot serve this: {obstacle}")
    if config.kernels == "auto" and device.type == "cpu":
        report(f"kernels: torch's, for the native ones cannot serve this: {obstacle}")
    return TorchForward(DecoderModel(shape, weights, dtype, device))
