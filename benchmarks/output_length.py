"""Output lengths: what OutputLengthPredictor knows, beside a constant and an oracle, and whether entropy pays.

Requests end one after the other; each is predicted before its end is learnt, and the second half is scored. Lengths are
those of ShareGPT's answers, of Azure's production traces (--trace FILE, as often as there are files), and of the
embedded model's own chat answers to ShareGPT prompts with the entropy of the first token's 20 likeliest (--generate N;
--answers FILE keeps them and reads them again). Four buckets have the quartiles of the first half as bounds, so that a
constant is right one time in four. "constant" says the median and P90 of all that ended; rows "after k" are of requests
that have generated k tokens already.

Bar: P90 covers 85-95 % in each data set, and accuracy is no lower than the constant's (by more than chance).
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from common import Verdict, arguments
from headway import SamplingParams
from headway.core.output_length import OutputLengthPredictor
from headway.core.request import Request
from headway.core.table import Floats, RequestTable, Rows
from headway.engine.llm import LLM
from headway.lab.workload import sharegpt
from lengths import sharegpt_lengths, trace_lengths

GENERATED = (16, 64, 256)
COVERED = (0.85, 0.95)
WANTED = 0.7
CHANCE = 0.03
"""By so much two accuracies over some hundred requests may differ without meaning anything."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One request: lengths in tokens, whether it ended by itself, and its first token's entropy in nats, if known."""

    prompt_len: int
    output_len: int
    max_tokens: int = 4096
    natural: bool = True
    entropy: float | None = None


@dataclass(slots=True)
class Guesses:
    """Of one way of predicting: medians and P90s, and what became of the same requests."""

    median: list[float]
    p90: list[float]
    truth: list[int]

    def add(self, median: float, p90: float, truth: int) -> None:
        self.median.append(median)
        self.p90.append(p90)
        self.truth.append(truth)

    def scores(self, bounds: Floats) -> dict[str, float]:
        """Share in the right bucket, share that P90 covers, Spearman's rank correlation, and how many there were."""
        truth, median = np.array(self.truth), np.array(self.median)
        right = np.searchsorted(bounds, median) == np.searchsorted(bounds, truth)
        return {
            "accuracy": float(right.mean()),
            "covered": float((truth <= np.ceil(self.p90)).mean()),
            "spearman": spearman(median, truth),
            "requests": len(truth),
        }


def spearman(one: Floats, other: Floats) -> float:
    """Rank correlation, ties sharing their mean rank; 0 where one of them is constant."""
    ranks = [_ranks(values) for values in (one, other)]
    if any(rank.std() == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Floats) -> Floats:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def play(requests: Sequence[Ended]) -> tuple[dict[str, Guesses], bool]:
    """Predictions for the second half of `requests`, by way of predicting; and whether the entropy was used at the end.

    Those that were cut off teach, but are not scored: nobody knows how long they would have become.
    """
    table, predictor = RequestTable(), OutputLengthPredictor()
    names = ["constant", "before prefill", "after prefill", *(f"after {k}" for k in GENERATED)]
    guesses = {name: Guesses([], [], []) for name in names}
    ended: list[int] = []
    for i, one in enumerate(requests):
        request = Request(str(i), i, [0] * one.prompt_len, SamplingParams(max_tokens=one.max_tokens), 0.0)
        rows = np.array([table.add(request, one.prompt_len + one.max_tokens, 2)])
        predictor.begin(table, rows)
        scored = i >= len(requests) // 2 and one.natural
        if scored:
            guesses["constant"].add(*np.quantile(ended, [0.5, 0.9]), one.output_len)
            _guess(guesses["before prefill"], predictor, table, rows, 0, one)
        if one.entropy is not None:
            predictor.note_entropy(table, rows, np.array([one.entropy]))
        if scored:
            _guess(guesses["after prefill"], predictor, table, rows, 1, one)
            for generated in GENERATED:
                if generated < one.output_len:
                    _guess(guesses[f"after {generated}"], predictor, table, rows, generated, one)
        table.length[rows] = one.prompt_len + one.output_len
        predictor.finished(table, int(rows[0]), one.natural)
        table.free(int(rows[0]))
        if one.natural:
            ended.append(one.output_len)
    return guesses, predictor.entropy_pays


def _guess(
    into: Guesses, predictor: OutputLengthPredictor, table: RequestTable, rows: Any, generated: int, one: Ended
) -> None:
    table.length[rows] = one.prompt_len + min(generated, one.output_len - 1)
    median, p90 = predictor.quantiles(Rows(table, rows, 0.0), [0.5, 0.9])[0]
    into.add(median, p90, one.output_len)


def generate(count: int, seed: int, most: int) -> list[Ended]:
    """The embedded model's greedy answers to ShareGPT prompts, as chat."""
    llm = LLM("smollm2", dtype="float32", prefix_caching=False)
    items = sharegpt(count, llm.tokenizer, seed=seed, max_prompt=256)
    prompts = [
        llm.tokenizer.apply_chat_template([{"role": "user", "content": str(item.prompt)}], add_generation_prompt=True)
        for item in items
    ]
    params = SamplingParams(max_tokens=most, temperature=0.0, logprobs=20)
    ended = []
    for completion in llm.generate(prompts, params):
        answer = completion.outputs[0]
        assert answer.logprobs is not None
        likeliest = np.array(answer.logprobs[0].top_logprobs)
        entropy = float(-(np.exp(likeliest) * likeliest).sum())
        natural = answer.finish_reason == "stop"
        ended.append(Ended(len(completion.prompt_token_ids), len(answer.token_ids), most, natural, entropy))
    return ended


def data_sets(args: Namespace) -> dict[str, list[Ended]]:
    """By name, in the order in which they are shown."""
    count = 1_500 if args.quick else 5_000
    sets = {"ShareGPT answers": [Ended(*pair) for pair in sharegpt_lengths(count, args.seed)]}
    for path in args.trace:
        sets[path.stem] = [Ended(max(1, p), max(1, o)) for p, o in trace_lengths(path)[: 4 * count]]
    if args.answers and args.answers.exists():
        sets["SmolLM2's answers"] = [Ended(**json.loads(line)) for line in args.answers.read_text().splitlines()]
    elif args.generate:
        answers = generate(args.generate, args.seed, args.max_answer)
        sets["SmolLM2's answers"] = answers
        if args.answers:
            args.answers.write_text("".join(json.dumps(asdict(one)) + "\n" for one in answers))
    for requests in sets.values():
        if requests[0].entropy is not None:
            random.Random(args.seed).shuffle(requests)
    return sets


def main(args: Namespace) -> int:
    table = Table(title="output lengths, second half of each data set")
    for name in ("data", "prediction", "requests", "four buckets", "P90 covers %", "Spearman"):
        table.add_column(name, justify="left" if name in ("data", "prediction") else "right")
    samples: dict[str, Any] = {}
    notes, passed = [], True
    for name, requests in data_sets(args).items():
        guesses, pays = play(requests)
        first = [one.output_len for one in requests[: len(requests) // 2] if one.natural]
        scores = {
            way: each.scores(np.quantile(first, [0.25, 0.5, 0.75])) for way, each in guesses.items() if each.truth
        }
        samples[name] = {"scores": scores, "entropy pays": pays, "lengths": [asdict(one) for one in requests]}
        for way, score in scores.items():
            cells = (f"{score['requests']:,.0f}", f"{score['accuracy']:.2f}", f"{100 * score['covered']:.1f}")
            table.add_row(name, way, *cells, f"{score['spearman']:.2f}")
        table.add_row(name, "oracle", f"{scores['constant']['requests']:,.0f}", "1.00", "100.0", "1.00")
        table.add_section()
        new = scores["before prefill"]
        passed &= (
            COVERED[0] <= new["covered"] <= COVERED[1] and new["accuracy"] >= scores["constant"]["accuracy"] - CHANCE
        )
        if requests[0].entropy is not None:
            verdict = "pays and is used" if pays else "does not pay and is left out"
            notes.append(f"{name}: the entropy of the first token {verdict}")
        if new["accuracy"] < WANTED:
            best = max(scores, key=lambda way: scores[way]["accuracy"])
            notes.append(
                f"{name}: {new['accuracy']:.2f} of four buckets before the start, below {WANTED}: lengths differ much "
                f"among requests that are alike in all that is known of them; {scores[best]['accuracy']:.2f} {best}"
            )
    if not args.generate and not args.answers:
        notes.append("without --generate or --answers: whether entropy pays is not measured")
    covered = [100 * each["scores"]["before prefill"]["covered"] for each in samples.values()]
    accuracy = [each["scores"]["before prefill"]["accuracy"] for each in samples.values()]
    sentence = (
        f"Before a request starts its P90 covers {min(covered):.1f} to {max(covered):.1f} % (bar 85 to 95) and four "
        f"buckets are right in {min(accuracy):.2f} to {max(accuracy):.2f} of cases over {len(samples)} data sets."
    )
    return Verdict(table, sentence, passed, samples, notes).conclude(args)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE", help="an Azure trace, CSV")
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="answers to generate with the model")
    parser.add_argument("--max-answer", type=int, default=512, metavar="TOKENS", help="of a generated answer")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="keep the generated answers, or read them")
    sys.exit(main(parser.parse_args()))
