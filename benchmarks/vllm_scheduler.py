"""Times vLLM's scheduler alone, without a model: `PYTHON vllm_scheduler.py ROWS STEPS`, with a Python that has vLLM.

Prints a JSON list: microseconds of schedule and update_from_output together for each step, all rows decoding. Run by
scheduler_overhead.py; it imports nothing of headway.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

PROMPT, BLOCK_SIZE, LONGEST = 16, 16, 16_384
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 32_000,
    "max_position_embeddings": LONGEST,
    "torch_dtype": "float32",
}
"""Only its shape is read."""


def make_scheduler(rows: int, folder: Path) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST)
    limits = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(2 * rows + 512, LONGEST),
        max_model_len=LONGEST,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
    )
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=model, scheduler_config=limits, cache_config=cache, device_config=DeviceConfig("cpu")
    )
    num_blocks = rows * 64 + 1
    cache.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=True,
    )


def add_requests(scheduler: Any, rows: int) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    for number in range(rows):
        params = SamplingParams(max_tokens=900, temperature=0.0, ignore_eos=True)
        tokens = [number % 30_000] * (PROMPT + number % 7)
        scheduler.add_request(Request(f"r{number}", tokens, params, None, block_hasher=hasher))


def step(scheduler: Any) -> tuple[float, bool]:
    """Seconds of one step, and whether all its rows decoded."""
    from vllm.v1.outputs import ModelRunnerOutput

    began = perf_counter()
    scheduled = scheduler.schedule()
    middle = perf_counter()
    ids = list(scheduled.num_scheduled_tokens)
    output = ModelRunnerOutput(
        req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=[[7] for _ in ids]
    )
    again = perf_counter()
    scheduler.update_from_output(scheduled, output)
    seconds = middle - began + perf_counter() - again
    return seconds, scheduled.total_num_scheduled_tokens == len(ids)


def main() -> None:
    rows, steps = int(sys.argv[1]), int(sys.argv[2])
    with tempfile.TemporaryDirectory() as folder:
        scheduler = make_scheduler(rows, Path(folder))
    add_requests(scheduler, rows)
    times: list[float] = []
    while len(times) < steps + 16:
        seconds, decodes = step(scheduler)
        if decodes:
            times.append(seconds * 1e6)
    print(json.dumps(times[16:]))


if __name__ == "__main__":
    main()
