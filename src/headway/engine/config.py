"""How an engine is set up: the model, the executor's memory, the scheduler's limits, the bounds of its queues."""

from __future__ import annotations

from dataclasses import dataclass, field

from headway.core.config import SchedulerConfig
from headway.executors.config import Dtype, Kernels, Quantization


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All that `headway serve` and `LLM` can set.

    `model`: None or "smollm2" (the embedded one), a folder in Hugging Face layout, or a .gguf file. `max_waiting`:
    requests that may wait before new ones are refused. `event_log`: a file that receives all that drove the scheduler.
    `watchdog_seconds`: how long requests may wait while nothing happens before the watchdog acts (None: for ever).
    The other fields are those of ExecutorConfig and SchedulerConfig.
    """

    model: str | None = None
    served_model_name: str | None = None
    executor: str = "torch"
    dtype: Dtype = "auto"
    device: str = "auto"
    kv_cache_memory: int | None = None
    swap_space: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size: int = 32
    max_model_len: int | None = None
    threads: int | None = None
    kernels: Kernels = "auto"
    quantization: Quantization | None = None
    max_waiting: int = 4096
    event_log: str | None = None
    watchdog_seconds: float | None = 10.0
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
