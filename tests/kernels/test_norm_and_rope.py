"""Normalisation and rotation against transformers' and in any company."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headway.kernels.norm import rms_norm
from headway.kernels.rope import apply_rope, rope_angles, rope_table

DTYPES = [torch.float32, torch.bfloat16]
INV_FREQ = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
TABLE = rope_table(INV_FREQ, 5000)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_norm_equals_that_of_transformers_to_the_bit():
    norm = LlamaRMSNorm(576, eps=1e-5)
    norm.weight.data = random(576, dtype=torch.float32)
    x = 10 * random(50, 576, dtype=torch.float32)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


def test_norm_in_bfloat16_rounds_once():
    x, weight = random(50, 576, dtype=torch.bfloat16), random(576, dtype=torch.bfloat16)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    half_a_unit = 2**-8  # of bfloat16's last place, relative; rounding twice may err by two
    assert ((rms_norm(x, weight, 1e-5) - exact).abs() <= exact.abs() * half_a_unit * 1.0001).all()


def test_rotation_equals_that_of_transformers_to_the_bit():
    q, k = random(40, 12, 64, dtype=torch.float32).split((8, 4), dim=1)
    positions = torch.arange(40) * 100
    angles = positions[:, None].float() * torch.cat((INV_FREQ, INV_FREQ))
    expected = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    ours = [apply_rope(x, *rope_angles(TABLE, positions)) for x in (q, k)]
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])


def test_a_rotated_product_depends_on_the_distance_alone():
    q, k = random(2, 1, 1, 64, dtype=torch.float64)

    def product(at: int, behind: int) -> float:
        rotate = [apply_rope(x, *rope_angles(TABLE, torch.tensor([p]))) for x, p in ((q, at), (k, at - behind))]
        return float((rotate[0] * rotate[1]).sum())

    assert product(100, 7) == pytest.approx(product(3000, 7), abs=1e-3)
    assert product(100, 7) != pytest.approx(product(100, 8), abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_a_row_never_depends_on_the_others(dtype, rows):
    x, weight = random(300, 576, dtype=dtype), random(576, dtype=dtype)
    whole = rms_norm(x, weight, 1e-5)
    assert torch.equal(rms_norm(x[:rows], weight, 1e-5), whole[:rows])
    assert torch.equal(rms_norm(x[300 - rows :], weight, 1e-5), whole[300 - rows :])
    heads, positions = random(300, 9, 64, dtype=dtype), torch.arange(300) * 16
    rotated = apply_rope(heads, *rope_angles(TABLE, positions))
    assert torch.equal(apply_rope(heads[-rows:], *rope_angles(TABLE, positions[-rows:])), rotated[-rows:])
