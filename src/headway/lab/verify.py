"""Proof on the user's machine that no answer depends on how it was served: each way against one request at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headway.core.config import SchedulerConfig
from headway.core.request import SamplingParams
from headway.core.strategies import FORMATIONS
from headway.engine.async_engine import Engine
from headway.engine.config import EngineConfig
from headway.engine.resolve import resolve_model
from headway.kernels.native import kept_bytes
from headway.lab import machine
from headway.lab.workload import random_tokens
from headway.models.config import load_config

SMALL_POOLS = (0.5, 0.35, 0.2)
"""Of what the requests in flight need: KV memory so small (the first that does it) that some must leave and return."""
CHUNK = 48
"""Tokens of a step where prompts are cut into pieces."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's tokens, the natural-log probability of each and the best two tokens with theirs, and its text."""

    token_ids: list[int]
    logprobs: list[float]
    best: list[dict[int, float]]
    text: str


@dataclass(slots=True)
class Check:
    """One way of serving. `mismatches`: answers whose tokens differ; `bits`: answers with the same tokens, one of whose
    log probabilities differs in some bit. `first`: where the first mismatch is, for a person."""

    name: str
    prompts: int = 0
    tokens: int = 0
    mismatches: int = 0
    bits: int = 0
    first: str = ""

    @property
    def passed(self) -> bool:
        return not self.mismatches and not self.first


@dataclass(frozen=True, slots=True)
class Traffic:
    """Prompts (token ids), the length of each answer, and how many are in flight together."""

    prompts: list[list[int]]
    length: int
    in_flight: int

    @staticmethod
    def draw(count: int, length: int, in_flight: int, vocab_size: int, seed: int) -> Traffic:
        """Prompts of 1 to about 200 tokens; every fourth begins like the one before it."""
        lengths = [1 + (37 * i + 11 * seed) % 200 for i in range(count)]
        prompts = [
            list(random_tokens(1, prompt_len=n, output_len=1, seed=1000 * seed + i, vocab_size=vocab_size)[0].prompt)
            for i, n in enumerate(lengths)
        ]
        for i in range(3, count, 4):
            prompts[i] = prompts[i - 1] + prompts[i]
        return Traffic(prompts, length, in_flight)

    @property
    def longest(self) -> int:
        return max(map(len, self.prompts)) + self.length


@dataclass(slots=True)
class Report:
    """What was proved, and on what: `backend` are the start's lines about weights and memory."""

    checks: list[Check] = field(default_factory=list)
    backend: list[str] = field(default_factory=list)


async def verify(config: EngineConfig, traffic: Traffic, progress: Callable[[str], None] = lambda name: None) -> Report:
    """Serves the traffic in every way and compares each answer with that of the request served alone.

    Raises:
        ModelError: the model cannot be found, read or served.
    """
    report = Report()
    budget = max(SchedulerConfig().max_num_batched_tokens, traffic.in_flight)
    limits = SchedulerConfig(
        max_batch_size=traffic.in_flight, max_num_seqs=traffic.in_flight, max_num_batched_tokens=budget
    )
    config = replace(config, scheduler=limits, max_model_len=traffic.longest)
    async with await Engine.start(config, report=report.backend.append) as engine:
        progress("one at a time")
        await engine.follow(replace(limits, depth=1, chunked_prefill=False))
        salts = (f"alone {i}" for i in range(len(traffic.prompts)))  # nothing is known beforehand
        alone = [(await _serve(engine, [p], traffic.length, s))[0] for p, s in zip(traffic.prompts, salts, strict=True)]
        whole = Check("stream ≡ whole")
        for answer, prompt in zip(alone, traffic.prompts, strict=True):
            _compare_text(whole, answer, engine.tokenizer.decode(answer.token_ids), prompt)
        report.checks.append(whole)
        ways = {
            "batched ≡ alone": limits,
            "chunked ≡ whole": replace(limits, max_num_batched_tokens=max(CHUNK, traffic.in_flight)),
            "depth 1 ≡ depth 2": replace(limits, depth=1),
            **{f"formation {name}": replace(limits, batching=name, static_timeout=0.2) for name in FORMATIONS},
        }
        for name, way in ways.items():
            progress(name)
            await engine.follow(way)
            report.checks.append(_compare(name, alone, await _serve(engine, traffic.prompts, traffic.length, name)))
        progress("cache hit ≡ miss")
        report.checks.append(await _hit(engine, traffic, alone, known=name))
        progress("abort frees everything")
        report.checks.append(await _abort(engine, traffic))
    progress("preempted ≡ not")
    report.checks.append(await _preempt(config, traffic, alone))
    return report


async def _serve(engine: Engine, prompts: Sequence[Sequence[int]], length: int, salt: str) -> list[Answer]:
    """All prompts at once; beginnings are shared with those of the same `salt` only."""
    params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2)

    async def one(prompt: Sequence[int]) -> Answer:
        answer = Answer([], [], [], "")
        text = ""
        async with engine.generate(prompt, params, cache_salt=salt) as stream:
            async for delta in stream:
                text += delta.text
                answer.token_ids.extend(delta.token_ids)
                for entry in delta.logprobs or ():
                    answer.logprobs.append(entry.logprob)
                    answer.best.append(dict(zip(entry.top_ids, entry.top_logprobs, strict=True)))
        return replace(answer, text=text)

    return list(await asyncio.gather(*map(one, prompts)))


def _compare(name: str, alone: Sequence[Answer], served: Sequence[Answer]) -> Check:
    check = Check(name, len(alone), sum(len(answer.token_ids) for answer in served))
    for i, (truth, answer) in enumerate(zip(alone, served, strict=True)):
        if answer.token_ids != truth.token_ids:
            check.mismatches += 1
            check.first = check.first or _first_difference(i, truth, answer)
        elif answer.logprobs != truth.logprobs:
            check.bits += 1
    return check


def _first_difference(request: int, truth: Answer, answer: Answer) -> str:
    pairs = zip(truth.token_ids, answer.token_ids, strict=False)
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(truth.token_ids), len(answer.token_ids)))
    if at >= min(len(truth.token_ids), len(answer.token_ids)):
        return f"request {request} has {len(answer.token_ids)} tokens instead of {len(truth.token_ids)}"
    best = sorted(truth.best[at].values(), reverse=True)
    gap = f", where the best two logits are {best[0] - best[1]:.1e} apart" if len(best) > 1 else ""
    return f"request {request}, token {at}: {answer.token_ids[at]} instead of {truth.token_ids[at]}{gap}"


def _compare_text(check: Check, answer: Answer, whole: str, prompt: Sequence[int]) -> None:
    check.prompts += 1
    check.tokens += len(answer.token_ids)
    if answer.text != whole:
        check.mismatches += 1
        check.first = check.first or f"a prompt of {len(prompt)} tokens: {answer.text!r} instead of {whole!r}"


async def _hit(engine: Engine, traffic: Traffic, alone: Sequence[Answer], known: str) -> Check:
    before = (await engine.ping()).num_prefix_hits
    check = _compare("cache hit ≡ miss", alone, await _serve(engine, traffic.prompts, traffic.length, known))
    if (await engine.ping()).num_prefix_hits == before and not check.first:
        check.first = "nothing was found in the cache: nothing is proved"
    return check


async def _abort(engine: Engine, traffic: Traffic) -> Check:
    """Every stream is left after its first tokens; then nothing may be held."""
    check = Check("abort frees everything", len(traffic.prompts))
    params = SamplingParams(max_tokens=traffic.length, temperature=0.0, ignore_eos=True)

    async def leave(prompt: Sequence[int]) -> int:
        async with engine.generate(prompt, params) as stream:
            async for delta in stream:
                return delta.completion_tokens
        return 0

    check.tokens = sum(await asyncio.gather(*map(leave, traffic.prompts)))
    for _ in range(200):
        stats = await engine.ping()
        if not stats.num_running and not stats.num_waiting and not stats.kv_usage:
            return check
        await asyncio.sleep(0.05)
    check.first = f"{stats.num_running} running, {stats.num_waiting} waiting, {stats.kv_usage:.1%} of the KV pool held"
    return check


async def _preempt(config: EngineConfig, traffic: Traffic, alone: Sequence[Answer]) -> Check:
    shape = load_config(resolve_model(config.model))
    block = config.block_size
    per_block = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _item(config, shape.head_dim) * block
    needed = sorted((-(-(len(prompt) + traffic.length) // block) for prompt in traffic.prompts), reverse=True)
    check = Check("preempted ≡ not")
    for share in SMALL_POOLS:
        blocks = max(-(-traffic.longest // block) + 1, int(share * sum(needed[: traffic.in_flight])))
        async with await Engine.start(replace(config, kv_cache_memory=(blocks + 1) * per_block)) as engine:
            served = await _serve(engine, traffic.prompts, traffic.length, "preempted")
            preemptions = (await engine.ping()).num_preemptions
        check = _compare(check.name, alone, served)
        if preemptions or not check.passed:
            return check
    check.first = "nobody had to leave: nothing is proved"
    return check


def _item(config: EngineConfig, head_dim: int) -> int:
    """Bytes of one number in the KV pool."""
    kind = config.quantization or ("float32" if config.dtype == "float32" else "bfloat16")
    if config.device.startswith("cuda") or (config.device == "auto" and machine.facts()["gpus"]):
        return 4 if kind == "float32" else 2
    return kept_bytes(kind, config.kernels, head_dim, config.block_size)
