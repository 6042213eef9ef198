"""Show this machine, a model, and what fits in memory.

Reads the model's metadata and no weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.cli.engine_flags import MODEL_HELP, add_engine_arguments, engine_config
from headway.cli.errors import engine_errors

if TYPE_CHECKING:
    from pathlib import Path

    from headway.engine.config import EngineConfig
    from headway.models.config import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `headway info`."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the three tables."""
    config = engine_config(args)
    from headway.engine.resolve import resolve_model
    from headway.lab import machine
    from headway.models.config import load_config

    facts = machine.facts()
    with engine_errors():
        path = resolve_model(config.model)
        model = load_config(path)
        memory = _memory(config, path, model, facts)
    _print("machine", _machine(facts))
    _print("model", _model(path, model))
    _print("memory", memory)
    return 0


def _print(title: str, rows: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _machine(facts: Mapping[str, Any]) -> dict[str, str]:
    from headway.executors.memory import gigabytes

    return {
        "processor": f"{facts['processor']}, {facts['cores']} cores",
        "memory": f"{gigabytes(facts['memory'])}, {gigabytes(facts['memory_available'])} available",
        "GPUs": "; ".join(f"{gpu['name']}, {gigabytes(gpu['memory'])}" for gpu in facts["gpus"]) or "none",
        "system": f"{facts['platform']}, Python {facts['python']}",
        "versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items()),
    }


def _model(path: Path, model: ModelConfig) -> dict[str, str]:
    return {
        "files": str(path),
        "architecture": model.architecture,
        "parameters": f"{parameters(model) / 1e6:,.1f} M",
        "layers": f"{model.num_layers} of width {model.hidden_size}, MLP {model.intermediate_size}",
        "attention": f"{model.num_heads} heads of {model.head_dim}, {model.num_kv_heads} for keys and values",
        "vocabulary": f"{model.vocab_size:,} tokens",
        "longest sequence": f"{model.max_position_embeddings:,} tokens",
    }


def _memory(config: EngineConfig, path: Path, model: ModelConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """What an engine of `config` would give to weights and KV.

    Raises:
        ModelError: it would not fit.
    """
    from headway.executors.config import ExecutorConfig
    from headway.executors.memory import gigabytes, kv_budget
    from headway.kernels.native import kept_bytes

    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and bool(facts["gpus"]))
    item = 4 if config.dtype == "float32" else 2
    kind = config.quantization or ("float32" if config.dtype == "float32" else "bfloat16")
    kv_item = item if on_gpu else kept_bytes(kind, config.kernels, model.head_dim, config.block_size)
    item = 1 if config.quantization == "int8" else item
    weights = parameters(model) * item
    budget = kv_budget(
        ExecutorConfig(
            model=str(path),
            block_size=config.block_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.scheduler.seqs,
        ),
        kv_bytes_per_token(model, kv_item),
        model.max_position_embeddings,
        config.kv_cache_memory or _pool_memory(config, weights, facts, on_gpu),
    )
    requests = [f"{budget.num_tokens // length:,} of {length:,}" for length in (512, 2048, budget.max_model_len)]
    return {
        "weights": f"{gigabytes(weights)} with {item} bytes each (torch on a CPU may keep them wider)",
        "KV of a token": f"{budget.bytes_per_token:,} bytes = keys and values x {model.num_layers} layers x "
        f"{model.num_kv_heads} heads x {model.head_dim} x {kv_item} bytes",
        "KV pool": str(budget).removeprefix("KV pool "),
        "it holds": f"requests: {', '.join(requests)} tokens",
        "limits": f"{config.scheduler.seqs} requests hold KV at a time, {config.scheduler.max_batch_size} share a step",
    }


def _pool_memory(config: EngineConfig, weights: int, facts: Mapping[str, Any], on_gpu: bool) -> int:
    """About the bytes that an engine takes for the pool where nobody says how many."""
    from headway.executors.memory import CPU_POOL_LIMIT, CPU_SHARE

    if on_gpu:
        memory = facts["gpus"][0]["memory"] if facts["gpus"] else 0
        return int(memory * config.gpu_memory_utilization) - weights
    return int(min(CPU_POOL_LIMIT, CPU_SHARE * (facts["memory_available"] - weights)))


def parameters(model: ModelConfig) -> int:
    """Weights of the model, biases left out; a tied head counts once."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    heads = 1 if model.tie_word_embeddings else 2
    return model.num_layers * layer + heads * model.vocab_size * model.hidden_size + model.hidden_size


def kv_bytes_per_token(model: ModelConfig, item: int) -> int:
    """Bytes of one token's keys and values in all layers, `item` bytes a number."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * item
