"""`headway info` against the model's own tensors and the kernels' own rule."""

from __future__ import annotations

import pytest
import torch

from headway.cli.info import kv_bytes_per_token, parameters
from headway.cli.main import main
from headway.engine.resolve import resolve_model
from headway.kernels import native
from headway.kernels.kv_cache import bytes_per_token, kv_dtype
from headway.models.config import load_config
from headway.models.gguf import GgufFile


def test_sizes_are_those_of_the_model(capsys):
    path = resolve_model(None)
    config = load_config(path)
    numbers = 0
    for tensor in GgufFile(path).tensors.values():
        count = 1
        for side in tensor.shape:
            count *= side
        numbers += count
    assert parameters(config) == numbers
    kept = torch.bfloat16 if native.module() else kv_dtype(torch.bfloat16, "cpu")
    per_token = bytes_per_token(config.num_layers, config.num_kv_heads, config.head_dim, kept)
    assert kv_bytes_per_token(config, kept.itemsize) == per_token
    assert main(["info", "--device", "cpu", "--kv-cache-memory", "1G", "--block-size", "16"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"{numbers / 1e6:.1f} M" in text
    assert f"{per_token:,} bytes" in text
    blocks = 10**9 // (16 * per_token) - 1
    assert f"{blocks:,} blocks of 16 tokens" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kv-cache-memory", "100k"], "for the KV pool is too little"),
        (["--max-model-len", "1000000"], "more than the 8,192 tokens the model was made for"),
    ],
)
def test_what_does_not_fit_is_one_line(flags: list[str], message: str, capsys):
    assert main(["info", "--device", "cpu", *flags]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
