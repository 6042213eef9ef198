"""TorchExecutor: a decoder on a paged KV pool, one forward pass per batch, on a thread of its own.

The thread computes step k while the host collects k - 1 and schedules k + 1; torch lets go of the interpreter's lock
while it computes. Steps run in the order of their launch, and a sampled token goes straight into the slot's sequence on
the device, so a following step needs nothing from the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headway.core.batch import NO_SWAPS, Batch, StepOutput, Swaps
from headway.core.errors import ModelError
from headway.executors.base import Capacity
from headway.executors.config import ExecutorConfig
from headway.executors.forward import Forward, make_forward
from headway.executors.layout import Layout
from headway.executors.machine import available_cores, available_memory
from headway.executors.memory import CPU_POOL_LIMIT, CPU_SHARE, gigabytes, host_blocks, kv_budget
from headway.executors.slots import Slots
from headway.kernels.decode_attention import GATHERED
from headway.kernels.kv_cache import HostCache, KVCache, bytes_per_token
from headway.kernels.prefill_attention import QUERY_TILE
from headway.sampling.entropy import entropy_of_likeliest
from headway.sampling.sampler import Sampled, Sampler

Longs = npt.NDArray[np.int64]

DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "float32": torch.float32}
NO_ENTROPY = torch.zeros(0)
NOTHING_TO_CHOOSE = "the model's logits leave nothing to choose from (NaN, infinity, or every token forbidden)"


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step whose work has been given to the device. Times are those of time.perf_counter."""

    batch: Batch
    sampled: Sampled | None
    entropy: torch.Tensor
    """float32, of the rows that a prompt has brought to a token."""
    started: float
    submitted: float
    copy_time: float
    completion: _Completion


class TorchExecutor:
    """Computes batches with a model of Hugging Face layout or GGUF, on a CPU or one GPU."""

    def __init__(self, config: ExecutorConfig, report: Callable[[str], None] = lambda line: None) -> None:
        """Loads the model and makes the pool; `report` is told what they take.

        Raises:
            ModelError: the model cannot be read, the device is not there, or the memory is too little.
        """
        threads = config.threads or available_cores()
        torch.set_num_threads(threads)
        self._finished = 0.0
        self._thread = ThreadPoolExecutor(1, "headway-step", torch.set_num_threads, (threads,))
        try:
            self._thread.submit(self._load, config, threads, report).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def _load(self, config: ExecutorConfig, threads: int, report: Callable[[str], None]) -> None:
        """On the step's thread, too: OpenMP gives each thread that computes a team of its own, and as soon as the teams
        together have more members than there are cores, all wait asleep: a step of 64 rows took 207 ms, not 126."""
        device, dtype = _device(config.device), DTYPES[config.dtype]
        self._forward = make_forward(config, dtype, device, threads, report)
        shape, kept = self._forward.config, self._forward.kept
        budget = kv_budget(
            config,
            bytes_per_token(shape.num_layers, shape.num_kv_heads, shape.head_dim, kept),
            shape.max_position_embeddings,
            _pool_memory(config, self._forward) if config.kv_cache_memory is None else config.kv_cache_memory,
        )
        self._cache = KVCache(
            shape.num_layers, budget.num_blocks, budget.block_size, shape.num_kv_heads, shape.head_dim, kept, device
        )
        swapped = host_blocks(config, budget, available_memory())
        self._host = HostCache(self._cache, swapped)
        self._forward.bind(self._cache)
        num_slots = config.max_num_seqs + config.spare_slots
        self._sampler = Sampler(num_slots, shape.vocab_size, device, self._forward.best_of)
        self._slots = Slots(num_slots, budget.max_model_len, budget.block_size, self._cache.null_block, self._sampler)
        self._capacity = Capacity(
            budget.num_blocks,
            budget.block_size,
            config.max_num_seqs,
            budget.max_model_len,
            swapped,
            config.spare_slots,
        )
        where = f"{threads} threads" if device.type == "cpu" else torch.cuda.get_device_name(device)
        report(f"weights {gigabytes(self._forward.nbytes)} in {self._forward.arithmetic}, on {device.type} ({where})")
        report(f"{budget}, in {_name(kept)}; host memory for {swapped:,} swapped blocks")

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, batch: Batch) -> Future[_Launched]:
        return self._thread.submit(self._launch, batch)

    def done(self, ticket: Future[_Launched]) -> bool:
        return ticket.done() and (ticket.exception() is not None or ticket.result().completion.reached())

    def collect(self, ticket: Future[_Launched]) -> StepOutput:
        """Waits for the step. Whatever went wrong in it is raised here; steps launched later still run."""
        launched = ticket.result()
        finished = launched.completion.wait()
        started = max(launched.started, self._finished)
        output = _to_output(launched, finished - started, finished - max(launched.submitted, self._finished))
        self._finished = finished
        return output

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    @torch.inference_mode()
    def _launch(self, batch: Batch) -> _Launched:
        started = time.perf_counter()
        copy_time = self._copy(batch.swaps) if batch.swaps is not NO_SWAPS else 0.0
        self._slots.update(batch)
        step = Layout.of(batch, self._slots.tables, self._cache.block_size, self._cache.null_block)
        compute = self._forward.prepare(step)
        submitted = time.perf_counter()
        logits = compute(self._slots.tokens[self._tensor(step.slots), self._tensor(step.positions)])
        entropy = self._entropy(batch, logits)
        sampled = self._sample(batch, logits) if len(logits) else None
        return _Launched(batch, sampled, entropy, started, submitted, copy_time, _completion(self._forward.device))

    def _copy(self, swaps: Swaps) -> float:
        """Copies blocks out and in; returns the seconds that it took. Steps launched before have been computed by then,
        and none launched later begins before: blocks are never copied early, nor given to others too soon."""
        if self._forward.device.type == "cuda":
            torch.cuda.synchronize(self._forward.device)
        began = time.perf_counter()
        for copy, device, host in (
            (self._host.copy_out, swaps.out_device, swaps.out_host),
            (self._host.copy_in, swaps.in_device, swaps.in_host),
        ):
            if len(device):
                copy(torch.from_numpy(device.astype(np.int64)), torch.from_numpy(host.astype(np.int64)))
        return time.perf_counter() - began

    def _entropy(self, batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        which = np.flatnonzero(batch.num_tokens[batch.samples] > 1)
        if not len(which):
            return NO_ENTROPY
        return entropy_of_likeliest(logits[self._tensor(which)]).to("cpu", non_blocking=True)

    def _sample(self, batch: Batch, logits: torch.Tensor) -> Sampled:
        slots = batch.slots[batch.samples].astype(np.int64)
        positions = (batch.starts + batch.num_tokens)[batch.samples].astype(np.int64)
        sampled = self._sampler.sample(logits, slots, positions, self._slots.tokens)
        self._slots.tokens[self._tensor(slots), self._tensor(positions)] = sampled.token_ids
        return sampled.to_host()

    def _tensor(self, array: Longs) -> torch.Tensor:
        return torch.from_numpy(array).to(self._forward.device)


def _after_prompt(batch: Batch) -> Longs:
    """Positions in the batch of the rows that a prompt, or the end of one, has brought to a token."""
    return np.flatnonzero(batch.samples & (batch.num_tokens > 1))


def _to_output(launched: _Launched, elapsed: float, device_time: float) -> StepOutput:
    batch, sampled = launched.batch, launched.sampled
    counts = np.zeros(len(batch.slots), np.int32)
    if sampled is None:
        return StepOutput(
            batch.step_id,
            counts,
            np.zeros(0, np.int32),
            elapsed=elapsed,
            device_time=device_time,
            copy_time=launched.copy_time,
        )
    valid = sampled.valid.numpy()
    rows = np.flatnonzero(batch.samples)
    counts[rows[valid]] = 1
    logprobs = sampled.list_logprobs()
    return StepOutput(
        step_id=batch.step_id,
        counts=counts,
        token_ids=sampled.token_ids.numpy()[valid].astype(np.int32),
        logprobs=None if logprobs is None else [entry for entry, ok in zip(logprobs, valid, strict=True) if ok],
        elapsed=elapsed,
        device_time=device_time,
        copy_time=launched.copy_time,
        failed=dict.fromkeys(rows[~valid].tolist(), NOTHING_TO_CHOOSE),
        entropy=dict(zip(_after_prompt(batch).tolist(), launched.entropy.tolist(), strict=True)),
    )


class _Completion(Protocol):
    """When the device has worked off a step. Times are those of time.perf_counter."""

    def reached(self) -> bool: ...

    def wait(self) -> float:
        """Waits for the device; returns when it had finished."""
        ...


@dataclass(frozen=True, slots=True)
class _Past:
    """A CPU has computed the step when launching it returns."""

    finished: float

    def reached(self) -> bool:
        return True

    def wait(self) -> float:
        return self.finished


class _Recorded:
    """A GPU computes on after the launch."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event()
        self._event.record()

    def reached(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> float:
        self._event.synchronize()
        return time.perf_counter()


def _completion(device: torch.device) -> _Completion:
    return _Past(time.perf_counter()) if device.type == "cpu" else _Recorded()


def _device(name: str) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"there is no device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ModelError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _pool_memory(config: ExecutorConfig, model: Forward) -> int:
    """Bytes for the KV pool where nobody says how many, now that the weights are loaded."""
    if model.device.type == "cpu":
        return int(min(CPU_POOL_LIMIT, CPU_SHARE * available_memory()))
    free, total = torch.cuda.mem_get_info(model.device)
    used = total - free
    return int(total * config.gpu_memory_utilization) - used - _working_memory(config, model)


def _working_memory(config: ExecutorConfig, model: Forward) -> int:
    """Bytes that a full step takes beside weights and pool: logits three times over, activations, gathered context."""
    shape = model.config
    logits = 3 * config.max_num_seqs * shape.vocab_size
    widest = 4 * shape.hidden_size + 3 * shape.intermediate_size + 4 * shape.num_heads * shape.head_dim
    context = max(GATHERED, shape.max_position_embeddings) * (4 * shape.num_kv_heads * shape.head_dim)
    scores = 2 * QUERY_TILE * shape.num_heads * shape.max_position_embeddings
    return torch.float32.itemsize * (logits + config.max_num_batched_tokens * widest + context + scores)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
