"""Each native kernel against what this machine can do and against torch's own call.

The limits are measured in the same run: reading memory with all threads, and multiplying numbers in registers in the
fastest way that the processor has. A linear layer cannot take less than the larger of (bytes of its weight / bandwidth)
and (multiplications / peak). Weights come from memory: as many copies of a layer are computed one after the other as
fill 270 MB. Left out: what stands between the kernels (see the engine's own figures) and other processes.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.table import Table
from torch.nn import functional

from common import Verdict, arguments, measured
from headway.executors.machine import available_cores
from headway.kernels import native
from headway.kernels.kv_cache import KVCache
from headway.models.config import ModelConfig
from headway.models.native import NativeDecoder
from headway.models.weights import Weights

SMALL = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
LARGE = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
COLD = 270 * 2**20
ITEM = {"float32": 4, "bfloat16": 2, "int8": 1}
REST = 0.02
"""Seconds between the two threadings, so that neither's threads still spin while the other computes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """bandwidth in bytes per second, products per second by kind of weight."""

    bandwidth: float
    products: dict[str, float]

    def seconds(self, kind: str, rows: int, outputs: int, inputs: int) -> float:
        weights = outputs * inputs
        return max(weights * ITEM[kind] / self.bandwidth, rows * weights / self.products[kind])


def measure_limits(module, pool, isa: str) -> Limits:
    bandwidth = COLD / min(module.read_memory(pool, COLD, 7))
    kinds = {kind: module.products_per_second(pool, kind, isa) for kind in ITEM}
    if "avx512_bf16" in module.available():  # whichever way is faster here is the limit
        kinds["bfloat16"] = max(kinds["bfloat16"], module.products_per_second(pool, "bfloat16", "avx512_bf16"))
    kinds["bfloat16"] = max(kinds["bfloat16"], kinds["float32"])
    return Limits(bandwidth, kinds)


def at_best(limits: list[Limits]) -> Limits:
    """Of several measurements, since a limit is what the machine can do while nobody disturbs it."""
    kinds = {kind: max(each.products[kind] for each in limits) for kind in ITEM}
    return Limits(max(each.bandwidth for each in limits), kinds)


def bar(kind: str, rows: int) -> float:
    """The share of the limit that is asked for."""
    share = 0.9 if rows <= 4 else 0.75 if rows == 16 else 0.8
    return share - (0.05 if kind == "int8" else 0)


def torch_call(kind: str, weight: torch.Tensor, rows: int, copies: int) -> Callable[[], object]:
    """torch's way to the same product, once for each copy of the weight."""
    x = torch.randn(rows, weight.shape[1])
    if kind == "int8":
        scale = (weight.abs().amax(1) / 127).double()
        rounded = torch.quantize_per_channel(weight, scale, torch.zeros(len(scale), dtype=torch.int64), 0, torch.qint8)
        packed = [torch.ops.quantized.linear_prepack(rounded, None) for _ in range(copies)]
        return lambda: [torch.ops.quantized.linear_dynamic(x, one, True) for one in packed]
    dtype = getattr(torch, kind)
    x, weights = x.to(dtype), [weight.to(dtype) for _ in range(copies)]
    return lambda: [functional.linear(x, one) for one in weights]


def times(call: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def linear_layers(module, pool, limits: Limits, args, samples: dict, table: Table) -> list[str]:
    missed = []
    kinds = ["bfloat16", "int8"] if args.quick else list(ITEM)
    shapes = {"gate_up": SMALL["gate_up"], "down": SMALL["down"]} if args.quick else SMALL
    counts = [1, 4, 8, 16, 32, 64, 256] if args.quick else [1, 2, 4, 8, 16, 32, 64, 256, 1024, 4096]
    for where, layers in (("135M", shapes), *([] if args.quick else [("8B", LARGE)])):
        for name, (outputs, inputs) in layers.items():
            weight = torch.randn(outputs, inputs) * inputs**-0.5
            for kind in kinds:
                copies = max(1, round(COLD / (outputs * inputs * ITEM[kind])))
                packed = [module.PackedLinear(weight, None, kind) for _ in range(copies)]
                for rows in counts:
                    some = copies if rows <= 64 else max(1, copies * 16 // rows)
                    x, out = torch.randn(rows, inputs), torch.empty(rows, outputs)
                    others = packed[1:some]
                    repeats = 5 if rows <= 256 else 3

                    def ours(x=x, out=out, packed=packed, others=others):
                        packed[0](pool, x, out, others=others)

                    theirs = torch_call(kind, weight, rows, some)
                    ours()
                    theirs()
                    pairs = []
                    for _ in range(repeats):
                        time.sleep(REST)
                        a = times(ours, 2)[1] / some
                        time.sleep(REST)
                        pairs.append((a, times(theirs, 2)[1] / some))
                    mine, other = (median(column) for column in zip(*pairs, strict=True))
                    share = limits.seconds(kind, rows, outputs, inputs) / mine
                    label = f"{where} {name} {outputs}x{inputs} {kind} at {rows}"
                    if share < bar(kind, rows) or other / mine < 0.97:
                        missed.append(f"{label}: {share:.0%} of the limit, {other / mine:.2f} x torch")
                    table.add_row(
                        f"{where} {name}", kind, str(rows), f"{mine * 1e6:,.0f}", f"{share:.0%}", f"{other / mine:.2f}"
                    )
                    samples[label] = pairs
                del packed
    return missed


class Blank(Weights):
    """A checkpoint of ones: attention takes as long whatever it reads."""

    source = Path("ones")

    def __contains__(self, name: str) -> bool:
        return False

    def get(self, name: str, *shape: int) -> torch.Tensor:
        return torch.ones(*shape)

    _shape = _read = get


def attention(pool_threads: int, limits: Limits, samples: dict, table: Table) -> list[str]:
    """Layers with the heads of the embedded model: 32 rows that decode at 1,024 tokens, prompts of 512 and 2,048."""
    config = ModelConfig("LlamaForCausalLM", 8, 576, 9, 3, 64, 64, 64, 4096, 1e-5, tie_word_embeddings=True)
    missed = []
    for kind, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        model = NativeDecoder(config, Blank(), kind, pool_threads)
        cache = KVCache(config.num_layers, 32 * 32, 32, config.num_kv_heads, config.head_dim, dtype)
        cache.keys.zero_()
        cache.values.zero_()
        model.bind(cache)
        tables = np.random.default_rng(0).permutation(32 * 32).reshape(32, 32)
        found = times(lambda m=model, t=tables: m.attend(np.full(32, 1023), np.ones(32, np.int64), t), 9)
        size = 2 * 32 * 1024 * config.num_kv_heads * config.head_dim * dtype.itemsize * config.num_layers
        share = size / limits.bandwidth / median(found[1:])
        table.add_row("attention", kind, "32 decode", f"{median(found) / 8 * 1e6:,.0f}", f"{share:.0%}", "")
        samples[f"decode attention {kind}"] = found
        if share < 0.85:
            missed.append(f"decode attention {kind}: {share:.0%} of the bandwidth")
        for length in (512, 2048):
            blocks = tables.reshape(1, -1)[:, : length // 32]
            found = times(lambda m=model, n=length, b=blocks: m.attend(np.zeros(1, np.int64), np.full(1, n), b), 7)
            products = config.num_layers * config.num_heads * config.head_dim * length * (length + 1)
            share = products / limits.products["bfloat16" if kind == "bfloat16" else "float32"] / median(found[1:])
            table.add_row("attention", kind, f"{length} prefill", f"{median(found) / 8 * 1e6:,.0f}", f"{share:.0%}", "")
            samples[f"prefill attention {length} {kind}"] = found
            if share < 0.62:
                missed.append(f"prefill attention of {length} in {kind}: {share:.0%} of the peak")
    return missed


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=available_cores(), help="of both sides (default: one a core)")
    args = parser.parse_args()
    module = native.module()
    if module is None:
        print("kernels.py: the native kernels were not built", file=sys.stderr)
        return 1
    warnings.filterwarnings("ignore")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    pool = module.Pool(args.threads)
    isa = module.available()[0]
    table = Table("kernel", "weights", "rows", "µs", "of the limit", "x torch", title=f"{isa}, {args.threads} threads")
    samples: dict = {}
    with torch.inference_mode(), measured() as whole:
        limits = at_best([measure_limits(module, pool, isa) for _ in range(3)])
        missed = attention(args.threads, limits, samples, table)
        missed += linear_layers(module, pool, limits, args, samples, table)
    samples["limits"] = {"bandwidth": limits.bandwidth, "products": limits.products}
    peaks = ", ".join(f"{kind} {2 * rate / 1e9:,.0f} G/s" for kind, rate in limits.products.items())
    notes = [f"limits: memory {limits.bandwidth / 1e9:.1f} GB/s; operations {peaks}", *(f"missed: {m}" for m in missed)]
    if args.quick:
        notes.append(
            "--quick leaves out float32, the shapes of an 8B model, three layers of the embedded one and some rows"
        )
    total = len(table.rows)
    sentence = f"{total - len(missed)} of {total} measurements keep their bars (share of the limit, 0.97 x torch)"
    return Verdict(table, sentence, not missed, samples, notes, whole.others).conclude(args)


if __name__ == "__main__":
    sys.exit(main())
