"""How an executor is set up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "bfloat16", "float32"]
Kernels = Literal["auto", "native", "torch"]
Quantization = Literal["int8"]


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The model and the memory it may take.

    `model`: a folder in Hugging Face layout or a .gguf file (already resolved: no names of models here).
    `dtype`: "auto" is bfloat16. `kv_cache_memory`: bytes for the KV pool (None: from what is free).
    `gpu_memory_utilization`: the share of a GPU's memory that headway may use. `max_model_len`: None takes the model's
    own limit or what the pool can hold, whichever is less. `threads`: None takes the cores that the cgroup allows.
    `max_num_seqs`: sequences; `spare_slots` more are kept for those that are leaving while others take their places.
    `swap_space`: bytes of the host's memory for KV that is swapped out (None: SWAP_SPACE, or SWAP_SHARE of what is free
    where that is less; 0: none). `kernels`: "auto" takes the native CPU kernels where they can serve the model, and
    torch's elsewhere. `quantization`: what weights are rounded to when they are read; "int8" keeps one scale per output
    channel.
    """

    model: str
    dtype: Dtype = "auto"
    device: str = "auto"
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size: int = 32
    max_model_len: int | None = None
    swap_space: int | None = None
    max_num_seqs: int = 128
    spare_slots: int = 0
    max_num_batched_tokens: int = 512
    threads: int | None = None
    kernels: Kernels = "auto"
    quantization: Quantization | None = None
