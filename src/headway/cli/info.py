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

    with engine_errors():
        path = resolve_model(config.model)
        model = load_config(path)
    _print("machine", _machine(machine.facts()))
    _print("model", _model(path, model))
    return 0


def _print(title: str, rows: Mapping[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _machine(facts: Mapping[str, Any]) -> dict[str, str]:
    return {
        "processor": f"{facts['processor']}, {facts['cores']} cores",
        "memory": f"{gigabytes(facts['memory'])}, {gigabytes(facts['memory_available'])} available",
        "GPUs": "; ".join(facts["gpus"]) or "none",
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


def parameters(model: ModelConfig) -> int:
    """Weights of the model, biases left out; a tied head counts once."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 2 * model.hidden_size
    heads = 1 if model.tie_word_embeddings else 2
    return model.num_layers * layer + heads * model.vocab_size * model.hidden_size + model.hidden_size


def gigabytes(size: float) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.2f} GB" if size < 1e11 else f"{size / 1e9:,.0f} GB"
