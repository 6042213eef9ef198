"""headway beside the engines that people use, on this machine: the same model, precision, prompts and limits.

--peers FOLDER holds them as their installers left them: openvino/, vllm/, llamacpp/ (each with its interpreter or
binaries), model-bf16/, model-ov-fp16/, model-ov-int8/, model-bf16.gguf, model-q8_0.gguf, and the prompts as token ids:
uniform512_128.jsonl, sharegpt200.jsonl, warmup.jsonl. What is not there is left out, and said to be. One engine at a
time, in turn, --rounds times over; each is started anew. Greedy, eos ignored, prefix caching off, 128 sequences.

Loads: 512 tokens in and 128 out, 1, 8, 32 and 64 at a time; 200 ShareGPT requests, 64 at a time; and ShareGPT by
Poisson arrivals at 0.8 of the best peer's requests per second. headway in process is compared with what runs in process
(OpenVINO), `headway serve` with servers (vLLM, llama.cpp). A ratio is the median of the rounds' ratios; the last column
is against the best peer. Start-up and warm-up are not part of any figure.

Bars: as printed; for int8 those in brackets.
"""

from __future__ import annotations

import signal
import statistics
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from common import Verdict, arguments, console, measured, spread
from headway.engine.resolve import resolve_model
from headway.lab.workload import Item, from_file
from peer_engines import Engine, Load, Peers, Sample

UNIFORM, SHAREGPT, WARMUP = "uniform512_128.jsonl", "sharegpt200.jsonl", "warmup.jsonl"
LOADS = {
    "1 at a time": Load(UNIFORM, 4, 1),
    "8 at a time": Load(UNIFORM, 16, 8),
    "32 at a time": Load(UNIFORM, 64, 32),
    "64 at a time": Load(UNIFORM, 64, 64),
    "ShareGPT, 64 at a time": Load(SHAREGPT, 200, 64),
}
POISSON, SHARE = "ShareGPT, Poisson at 0.8", 0.8
IN_PROCESS = ("headway", "OpenVINO")
QUICK = ("1 at a time", "32 at a time")
Samples = dict[str, dict[str, list[Sample]]]
"""By load, then by engine."""


def throughput(sample: Sample) -> float:
    return sample.tokens_per_second


def tpot(sample: Sample) -> float:
    return float(np.nanmean(sample.tpot))


def ttft_p99(sample: Sample) -> float:
    return float(np.percentile(sample.ttft, 99))


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of a load and the bars of its ratio to the best peer (bfloat16, int8): at least, or at most where
    `lower` is better."""

    load: str
    text: str
    figure: Callable[[Sample], float]
    bars: tuple[float, float]
    lower: bool = False


ROWS = (
    Row("1 at a time", "output tok/s", throughput, (1.45, 1.9)),
    Row("1 at a time", "TPOT, s", tpot, (0.72, 0.6), lower=True),
    Row("8 at a time", "output tok/s", throughput, (1.3, 1.7)),
    Row("32 at a time", "output tok/s", throughput, (1.2, 1.6)),
    Row("64 at a time", "output tok/s", throughput, (1.2, 1.6)),
    Row("ShareGPT, 64 at a time", "output tok/s", throughput, (1.6, 1.9)),
    Row(POISSON, "P99 TTFT, s", ttft_p99, (0.5, 0.5), lower=True),
)


def own(engine: str) -> str:
    """Which of headway's arms an engine is compared with."""
    return "headway" if engine in IN_PROCESS else "headway serve"


def ratios(row: Row, samples: Samples, engine: str) -> list[float]:
    """headway's figure over the engine's, round by round."""
    of = samples[row.load]
    return [row.figure(a) / row.figure(b) for a, b in zip(of[own(engine)], of[engine], strict=True)]


class Rounds:
    """Runs loads on engines in turn, and keeps every sample."""

    def __init__(self, args: Namespace, peers: Peers) -> None:
        self._args = args
        self._peers = peers
        self._engines = {
            name: start for name, start in peers.engines().items() if not args.engines or name in args.engines
        }
        self.samples: Samples = {}
        self.others = 0.0

    @property
    def names(self) -> list[str]:
        return list(self._engines)

    def run(self, loads: dict[str, Load]) -> None:
        for number in range(self._args.rounds):
            for name, start in self._engines.items():
                with start() as engine:
                    engine.drive(Load(WARMUP, 8, 8), self._items(Load(WARMUP, 8, 8)))
                    for label, load in loads.items():
                        self._take(number, name, label, engine, load)

    def _take(self, number: int, name: str, label: str, engine: Engine, load: Load) -> None:
        with measured() as used:
            sample = engine.drive(load, self._items(load))
        if sample.failed or sample.short:
            raise RuntimeError(f"{name}, {label}: {sample.failed} requests failed, {sample.short} answers were short")
        self.others = max(self.others, used.others)
        self.samples.setdefault(label, {}).setdefault(name, []).append(sample)
        console.print(
            f"round {number + 1}, {name}, {label}: {throughput(sample):.1f} tok/s, TPOT {tpot(sample) * 1e3:.1f} ms, "
            f"P99 TTFT {ttft_p99(sample):.2f} s"
        )

    def _items(self, load: Load) -> list[Item]:
        items = from_file(self._peers.folder / load.file, load.count)
        return [replace(item, output_len=max(1, item.output_len // self._args.shrink)) for item in items]

    def best_rate(self) -> float:
        """Requests per second of the best peer with ShareGPT, 64 at a time."""
        of = self.samples["ShareGPT, 64 at a time"]
        rates = {
            name: statistics.median(len(sample.ttft) / sample.seconds for sample in taken)
            for name, taken in of.items()
            if not name.startswith("headway")
        }
        return max(rates.values())


def verdict(args: Namespace, rounds: Rounds) -> Verdict:
    """The table and the figure."""
    peers = [name for name in rounds.names if not name.startswith("headway")]
    table = Table(title=f"{args.precision}: medians (min-max); headway over each peer", title_justify="left")
    for heading in ("load", "", *rounds.names, *(f"/ {name}" for name in peers), "/ best", "bar"):
        table.add_column(heading, justify="right" if heading else "left")
    passed, headline, missed = True, "", []
    for row in ROWS:
        if row.load not in rounds.samples:
            continue
        bar = row.bars[args.precision == "int8"]
        over = {name: statistics.median(ratios(row, rounds.samples, name)) for name in peers}
        best = max(over.values()) if row.lower else min(over.values())
        holds = best <= bar if row.lower else best >= bar
        if not holds:
            missed.append(f"{row.load} {row.text}")
        digits = 4 if row.lower else 1
        table.add_row(
            row.load,
            row.text,
            *(spread([row.figure(s) for s in rounds.samples[row.load][name]], digits) for name in rounds.names),
            *(f"{over[name]:.2f}" for name in peers),
            f"{best:.2f}",
            f"{'<=' if row.lower else '>='} {bar:g}{'' if holds else ' MISSED'}",
        )
        passed &= holds
        headline = headline or f"{best:.2f} times the best peer's {row.text} at {row.load}"
    notes = []
    if absent := {"OpenVINO", "vLLM", "llama.cpp"} - set(peers):
        notes.append(f"not there or left out: {', '.join(sorted(absent))}")
    if args.quick:
        notes.append(f"--quick: one round of {', '.join(QUICK)}; answers a quarter of their length")
    sentence = f"headway has {headline} ({args.precision}); bars missed: {', '.join(missed) or 'none'}."
    samples = {
        label: {name: [asdict(s) for s in taken] for name, taken in of.items()} for label, of in rounds.samples.items()
    }
    return Verdict(table, sentence, passed, samples, notes, rounds.others)


def main() -> int:
    """Runs the comparison; returns 1 where a bar is missed."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # engines are stopped on the way out
    parser = arguments(__doc__)
    parser.add_argument("--peers", type=Path, required=True, metavar="FOLDER", help="where the peers are")
    parser.add_argument("--precision", choices=["bfloat16", "int8"], default="bfloat16", help="of the weights")
    parser.add_argument("--rounds", type=int, help="alternations (default 3, with --quick 1)")
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--loads", nargs="+", metavar="NAME", help="only these, by their names in the table")
    parser.add_argument("--model", help="headway's: a folder or .gguf file (default: the embedded model)")
    args = parser.parse_args()
    args.rounds, args.shrink = args.rounds or (1 if args.quick else 3), 4 if args.quick else 1
    rounds = Rounds(args, Peers(args.peers, str(resolve_model(args.model)), args.precision))
    if not [name for name in rounds.names if not name.startswith("headway")]:
        parser.error(f"there is no peer in {args.peers}: see the head of this script for what is looked for")
    wanted = QUICK if args.quick else args.loads or (*LOADS, POISSON)
    rounds.run({label: load for label, load in LOADS.items() if label in wanted})
    if POISSON in wanted:
        rate = SHARE * rounds.best_rate()
        rounds.run({POISSON: Load(SHAREGPT, 200, 64, rate=rate, seed=args.seed)})
    return verdict(args, rounds).conclude(args)


if __name__ == "__main__":
    sys.exit(main())
