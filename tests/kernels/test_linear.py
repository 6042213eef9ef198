"""Linear layers against float64, whichever arithmetic this CPU gets; the others by asking for them."""

from __future__ import annotations

import pytest
import torch

from headway.kernels import linear
from headway.kernels.linear import (
    Linear,
    PackedLinear,
    TorchLinear,
    WidenedLinear,
    has_native_bf16,
    make_head,
    make_linear,
)

LAYERS = [
    TorchLinear,
    pytest.param(PackedLinear, marks=pytest.mark.skipif(not linear.has_onednn(), reason="no oneDNN")),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 32, 65])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_float32_equals_float64(kind: type[Linear], biased: bool, rows: int):
    weight, bias = random(96, 80), random(96, seed=1) if biased else None
    x = random(rows, 80, seed=2)
    y = kind(weight, bias)(x)
    assert y.shape == (rows, 96)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_make_linear_rounds_the_weight_to_the_dtype_and_no_more(dtype: torch.dtype):
    weight, bias, x = random(64, 48), random(64, seed=1), random(9, 48, seed=2).to(dtype)
    layer = make_linear(weight, bias, dtype)
    y = layer(x)
    assert y.dtype == dtype
    rounding = torch.finfo(dtype).eps + 1e-5
    torch.testing.assert_close(y.double(), exact(x, weight.to(dtype), bias.to(dtype)), rtol=rounding, atol=rounding)
    assert layer.nbytes >= 64 * 48 * dtype.itemsize


def test_widened_rounds_once():
    """A sum that bfloat16 accumulation would lose: the layer gives the exact one, rounded."""
    weight, x = torch.ones(1, 4096), torch.ones(1, 4096)
    x[0, 0] = 0.5
    layer = WidenedLinear(TorchLinear(weight, None))
    assert layer(x.bfloat16()).item() == torch.tensor(4095.5).bfloat16().item()


@pytest.mark.skipif(not linear.has_onednn(), reason="no oneDNN")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="known of oneDNN's AVX2 kernels only")
@pytest.mark.parametrize("shape", [(96, 80), (3072, 576), (576, 1536)])
def test_a_packed_row_is_the_same_to_the_bit_in_any_company(shape: tuple[int, int]):
    layer, x = PackedLinear(random(*shape), None), random(70, shape[1], seed=2)
    together = layer(x)
    for rows in (1, 2, 3, 8, 33):
        assert torch.equal(layer(x[:rows]), together[:rows])
    assert torch.equal(layer(x[40:41]), together[40:41])
    order = torch.randperm(70, generator=torch.Generator().manual_seed(3))
    assert torch.equal(layer(x[order]), together[order])


@pytest.mark.parametrize(
    ("native", "onednn", "kind"),
    [
        (True, True, PackedLinear),
        (False, True, WidenedLinear),
        (True, False, WidenedLinear),
        (False, False, WidenedLinear),
    ],
)
def test_bfloat16_is_widened_where_the_cpu_would_emulate_it(native, onednn, kind, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linear, "has_native_bf16", lambda: native)
    monkeypatch.setattr(linear, "has_onednn", lambda: onednn)
    chosen = []
    for name in ("PackedLinear", "TorchLinear", "WidenedLinear"):
        monkeypatch.setattr(
            linear, name, lambda *a, name=name: chosen.append(name) or TorchLinear(torch.ones(1, 1), None)
        )
    make_linear(random(8, 8), None, torch.bfloat16)
    assert chosen[-1] == kind.__name__
    assert ("no fast bfloat16 arithmetic" in linear.describe("cpu", torch.bfloat16)) == (kind is WidenedLinear)


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu amx_bf16 amx_tile\n", True),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16\n", False),
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512_bf16 amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("processor\t: 0\n", False),
        ("", False),
    ],
)
def test_what_the_processor_says_of_itself(cpuinfo: str, native: bool, tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "cpuinfo")
    linear.has_native_bf16.cache_clear()
    assert linear.has_native_bf16() == native
    monkeypatch.setattr(linear, "CPUINFO", tmp_path / "nothing")
    linear.has_native_bf16.cache_clear()
    assert not linear.has_native_bf16()
    linear.has_native_bf16.cache_clear()


@pytest.mark.skipif(has_native_bf16(), reason="here the head is computed in bfloat16 arithmetic")
def test_a_head_widened_to_float32_does_not_round_its_logits():
    """Two logits that only float32 tells apart stay apart."""
    weight = torch.tensor([[25.33], [25.24]]).to(torch.bfloat16)
    weight = torch.cat([weight, torch.tensor([[0.25], [-0.0625]]).to(torch.bfloat16)], dim=1)
    x = torch.tensor([[1.0, 0.125]], dtype=torch.bfloat16)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(make_head(weight, torch.bfloat16)(x).double(), expected, rtol=0, atol=1e-6)
    assert make_linear(weight, None, torch.bfloat16)(x).dtype == torch.bfloat16
