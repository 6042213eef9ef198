"""The native kernels against float64, and bit for bit against themselves in any company, chunks and threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from headway.kernels import native
from headway.kernels.kv_cache import KVCache
from headway.models.config import ModelConfig
from headway.models.native import NativeDecoder
from headway.models.weights import Weights

module = native.module()
if module is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

ISAS = module.available()
KINDS = ["float32", "bfloat16", "int8"]
NEAR = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.15}
"""Of the largest value: float32 sums; rounding to bfloat16 everywhere; to 255 steps per row and channel."""


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 80), (100, 50), (33, 7), (64, 2304)])
def test_a_linear_layer_equals_float64_whatever_its_rows(shape: tuple[int, int], kind: str, isa: str):
    weight, bias, x = random(*shape), random(shape[0], seed=1), random(300, shape[1], seed=2)
    exact = x.double() @ weight.double().T + bias.double()
    layer, pool, alone = module.PackedLinear(weight, bias, kind, False, isa), module.Pool(3), module.Pool(1)
    together = torch.empty(300, shape[0])
    layer(pool, x, together)
    assert (together - exact).abs().max() < NEAR[kind] * exact.abs().max()
    for rows in (1, 2, 3, 4, 5, 13, 14, 15, 29, 64, 257):
        few = torch.empty(rows, shape[0])
        layer(alone, x[:rows].contiguous(), few)
        assert torch.equal(few, together[:rows])
        layer(pool, x[300 - rows :].contiguous(), few)
        assert torch.equal(few, together[300 - rows :])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_becomes_of_the_sums(kind: str, isa: str):
    weight, x, before = random(2 * 72, 48), random(9, 48, seed=2), random(9, 144, seed=3)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    out, pool = torch.empty(9, 72), module.Pool(2)
    module.PackedLinear(weight, None, kind, True, isa)(pool, x, out)
    exact = functional.silu(gate) * up
    assert (out - exact).abs().max() < NEAR[kind] * exact.abs().max()
    out = before.clone()
    module.PackedLinear(weight, None, kind, False, isa)(pool, x, out, add=True)
    exact = before.double() + torch.cat([gate, up], dim=-1)
    assert (out - exact).abs().max() < NEAR[kind] * exact.abs().max()


def test_whole_numbers_are_summed_exactly():
    """int8 where nothing is rounded: 127 and whole numbers on both sides."""
    weight, x = (
        random(40, 64, scale=40).round().clamp(-126, 126),
        random(7, 64, seed=1, scale=40).round().clamp(-126, 126),
    )
    weight[:, 0], x[:, 0] = 127, -127
    for isa in ISAS:
        out = torch.empty(7, 40)
        module.PackedLinear(weight, None, "int8", False, isa)(module.Pool(1), x, out)
        torch.testing.assert_close(out.double(), x.double() @ weight.double().T, rtol=1e-6, atol=0)


def test_the_best_of_a_row():
    logits = random(6, 1003)
    logits[1, 7] = logits[1, 900] = 50.0
    logits[2, 30] = math.nan
    logits[3, 1002] = math.inf
    logits[4] = -math.inf
    for isa in ISAS:
        best, index = torch.empty(6), torch.empty(6, dtype=torch.int64)
        module.argmax(module.Pool(2), isa, logits, best, index)
        assert index[[0, 1, 3, 5]].tolist() == [int(logits[0].argmax()), 7, 1002, int(logits[5].argmax())]
        assert best[[0, 1, 3, 4, 5]].tolist() == logits[[0, 1, 3, 4, 5]].amax(-1).tolist()
        assert best[2].isnan()


class Random(Weights):
    """A checkpoint of random numbers."""

    source = Path("random")

    def __init__(self, config: ModelConfig) -> None:
        hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        key = config.num_kv_heads * config.head_dim
        shapes = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        self.tensors = {
            "model.embed_tokens.weight": random(config.vocab_size, hidden),
            "lm_head.weight": random(config.vocab_size, hidden, seed=1, scale=hidden**-0.5),
            "model.norm.weight": 1 + random(hidden, seed=2, scale=0.1),
        }
        for i in range(config.num_layers):
            prefix = f"model.layers.{i}"
            for j, (name, shape) in enumerate(shapes.items()):
                seed = 100 * i + 10 * j
                self.tensors[f"{prefix}.{name}.weight"] = random(*shape, seed=seed + 3, scale=2 * shape[1] ** -0.5)
                self.tensors[f"{prefix}.{name}.bias"] = random(shape[0], seed=seed + 4, scale=0.1)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.tensors[f"{prefix}.{norm}.weight"] = 1 + random(hidden, seed=100 * i + len(norm), scale=0.1)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def _read(self, name: str) -> Tensor:
        return self.tensors[name]


def shaped(heads: int = 6, kv_heads: int = 2, head_dim: int = 32, hidden: int = 80, inner: int = 112) -> ModelConfig:
    return ModelConfig(
        "LlamaForCausalLM", 2, hidden, heads, kv_heads, head_dim, inner, 300, 400, 1e-5,
        attention_bias=True, attention_output_bias=True, mlp_bias=True,
    )  # fmt: skip


def textbook(config: ModelConfig, tensors: dict[str, Tensor], token_ids: Sequence[int]) -> Tensor:
    """float64 logits [T, V] of one sequence, as the architecture is defined."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    count, dim, half = len(token_ids), config.head_dim, config.head_dim // 2
    angles = torch.arange(count).double()[:, None] / config.rope_theta ** (torch.arange(half).double() / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * w[f"{name}.weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    x = w["model.embed_tokens.weight"][torch.tensor(token_ids)]
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q, k, v = (linear(y, f"{layer}.self_attn.{name}_proj").view(count, -1, dim) for name in "qkv")
        group = config.num_heads // config.num_kv_heads
        k, v = turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", turned(q), k) / dim**0.5
        seen = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -math.inf).softmax(-1), v)
        x = x + linear(seen.flatten(1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        x = x + linear(
            functional.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj"),
            f"{layer}.mlp.down_proj",
        )
    return norm(x, "model.norm") @ w["lm_head.weight"].T


class Engine:
    """Sequences on one native model; blocks lie in no order, and the pool is full of NaN at first."""

    def __init__(
        self, config: ModelConfig, kind: str, sequences: list[list[int]], *, isa: str = "", threads: int = 2,
        block_size: int = 16, seed: int = 0,
    ) -> None:  # fmt: skip
        self.model = NativeDecoder(config, Random(config), kind, threads, isa=isa)
        width = -(-max(map(len, sequences)) // block_size)
        kept = torch.float32 if kind == "float32" else torch.bfloat16
        shape = (config.num_layers, width * len(sequences), block_size, config.num_kv_heads, config.head_dim)
        self.cache = KVCache(*shape, kept)
        self.cache.keys.fill_(math.nan)
        self.cache.values.fill_(math.nan)
        self.model.bind(self.cache)
        self.tables = np.random.default_rng(seed).permutation(width * len(sequences)).reshape(len(sequences), width)
        self.sequences = sequences
        self.computed = [0] * len(sequences)

    def step(self, parts: dict[int, int]) -> dict[int, Tensor]:
        """So many more tokens of each sequence: the logits of all of them."""
        rows = list(parts)
        starts, counts = np.array([self.computed[r] for r in rows]), np.array(list(parts.values()))
        tokens = [t for r, s, n in zip(rows, starts, counts, strict=True) for t in self.sequences[r][s : s + n]]
        everything = np.arange(len(tokens))
        logits = self.model.step(torch.tensor(tokens), starts, counts, self.tables[rows], everything)
        for row, count in parts.items():
            self.computed[row] += count
        return dict(zip(rows, logits.split(counts.tolist()), strict=True))


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(0, 300, n).tolist() for n in lengths]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_float64(kind: str, isa: str):
    config, (sequence,) = shaped(), prompts(150)
    logits = Engine(config, kind, [sequence], isa=isa).step({0: 150})[0]
    exact = textbook(config, Random(config).tensors, sequence)
    apart = (logits - exact).pow(2).mean().sqrt() / exact.std()
    assert apart < {"float32": 1e-5, "bfloat16": 0.04, "int8": 0.1}[kind]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 16, 16), (9, 3, 64, 32), (8, 1, 48, 64), (4, 2, 128, 128), (2, 1, 256, 32), (64, 1, 16, 32)],
)
def test_any_shape_of_heads_and_blocks(heads: int, kv_heads: int, head_dim: int, block_size: int):
    config, (sequence,) = shaped(heads, kv_heads, head_dim), prompts(140)
    engine = Engine(config, "float32", [sequence], block_size=block_size)
    logits = torch.cat([engine.step({0: n})[0] for n in (70, 1, 69)])
    exact = textbook(config, Random(config).tensors, sequence)
    assert (logits - exact).abs().max() < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_company_chunks_and_threads_change_no_bit(kind: str, isa: str, seed: int):
    """Sequences whole and alone on one thread, then in random steps with one another on several."""
    rng = np.random.default_rng(seed)
    config, sequences = shaped(), prompts(150, 33, 64, 1, 90, 17)
    alone = [Engine(config, kind, [s], isa=isa, threads=1).step({0: len(s)})[0] for s in sequences]
    engine = Engine(config, kind, sequences, isa=isa, threads=int(rng.integers(2, 4)), seed=seed)
    while left := [i for i, s in enumerate(sequences) if engine.computed[i] < len(s)]:
        chosen = rng.permutation(left)[: rng.integers(1, len(left) + 1)]
        sizes = {int(i): int(rng.integers(1, min(40, len(sequences[i]) - engine.computed[i]) + 1)) for i in chosen}
        begins = dict(enumerate(engine.computed))
        for i, logits in engine.step(sizes).items():
            assert torch.equal(logits, alone[i][begins[i] : begins[i] + len(logits)])


def test_nonsense_is_refused_before_anything_is_computed():
    engine = Engine(shaped(), "float32", prompts(20))
    logits, one, table = torch.empty(1, 300), np.array([1]), engine.tables
    step = engine.model._model.step
    zero, tokens = np.array([0]), np.array([5])
    with pytest.raises(ValueError, match="beyond the vocabulary"):
        step(np.array([300]), zero, one, table, zero, logits)
    with pytest.raises(ValueError, match="beyond its block table"):
        step(tokens, np.array([32]), one, table, zero, logits)
    with pytest.raises(ValueError, match="a block that is not there"):
        step(tokens, zero, one, table + 50, zero, logits)
    with pytest.raises(ValueError, match="beyond the positions"):
        step(tokens, np.array([400]), one, table, zero, logits)
    with pytest.raises(ValueError, match="not in the step"):
        step(tokens, zero, one, table, one, logits)
    with pytest.raises(ValueError, match="logits are"):
        step(tokens, zero, one, table, zero, torch.empty(1, 299))
