"""What tests of several areas share: the embedded model, its tokenizer, and a model small enough for any test."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

# One thread in every process that a test starts: tests run beside others, and sums must not depend on the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from headway.engine.gguf_tokenizer import tokenizer_from_gguf
from headway.engine.resolve import resolve_model
from headway.engine.text import Tokenizer
from headway.models.gguf import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


@pytest.fixture(scope="session")
def embedded_gguf() -> Path:
    """SmolLM2-135M-Instruct; downloaded if this machine never had it."""
    return resolve_model(None, progress=False)


@pytest.fixture(scope="session")
def tokenizer(embedded_gguf: Path) -> Tokenizer:
    return Tokenizer.load(embedded_gguf)


@pytest.fixture(scope="session")
def reference_model(embedded_gguf: Path) -> PreTrainedModel:
    """transformers' own reading of the embedded model, float32. Takes it 20 s: ask only where nothing else will do."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    return AutoModelForCausalLM.from_pretrained(
        embedded_gguf.parent,
        gguf_file=embedded_gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )


@pytest.fixture(scope="session")
def tiny_model_dir(embedded_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in Hugging Face layout, float32, the same at every call, with the embedded model's tokenizer.

    Its logits are spread so that the best one rarely has a rival.
    """
    folder = tmp_path_factory.mktemp("tiny-llama")
    metadata = GgufFile(embedded_gguf).metadata
    tokenizer_from_gguf(metadata).save(str(folder / "tokenizer.json"))
    texts = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(texts))
    config = TINY_CONFIG | {"vocab_size": len(metadata["tokenizer.ggml.tokens"])}
    (folder / "config.json").write_text(json.dumps(config))
    _save_random_weights(config, folder / "model.safetensors")
    return folder


def _save_random_weights(config: dict, path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    key = hidden // config["num_attention_heads"] * config["num_key_value_heads"]

    def random(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    weights = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": random(*shape, scale=3.0) for name, shape in shapes.items()}
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, path, metadata={"format": "pt"})
