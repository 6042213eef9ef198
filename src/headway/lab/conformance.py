"""Conformance: whether a policy keeps the promises that every policy makes, and its own about overtaking.

It orders random traffic in the real scheduler and loop, on a virtual clock. The verdict says nothing about how good the
order is, only that it is one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import numpy as np

from headway.core import strategies
from headway.core.batch import Ints
from headway.core.config import SchedulerConfig
from headway.core.policies import Policy
from headway.core.request import Request, SamplingParams, Slo
from headway.core.scheduler import Scheduler
from headway.core.table import Floats, Phase, RequestTable, Rows
from headway.executors.base import Capacity
from headway.lab import paced
from headway.lab.paced import StepTimes
from headway.lab.traffic import Arrival, poisson

STEP_TIMES = StepTimes(base=0.005, per_token=0.0005)
TIGHT = Capacity(num_blocks=96, block_size=16, max_num_seqs=0, max_model_len=512)
AMPLE = Capacity(num_blocks=4_000, block_size=16, max_num_seqs=0, max_model_len=512)
MOST_TOKENS = 400_000
"""Traffic that puts a claim about overtaking to the test."""


class Violation(Exception):
    """A promise that the policy has broken."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the verdict; `passed` None where it is only reported."""

    name: str
    passed: bool | None
    detail: str


class Watched(Policy):
    """Passes everything on to a policy and looks at what it does."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.pauses = policy.pauses
        self.table: RequestTable | None = None
        self.calls = 0
        self.overtaken = 0
        """Tokens of later arrivals served before a request's first: the most that any has seen."""
        self._work = np.zeros(1024, np.int64)
        self._begun: set[int] = set()

    def score(self, queue: Rows, now: float) -> Floats:
        before = _snapshot(queue._table)
        score = self.policy.score(queue, now)
        if not isinstance(score, np.ndarray) or score.shape != (len(queue),) or score.dtype != np.float64:
            what = f"{score.dtype}{list(score.shape)}" if isinstance(score, np.ndarray) else type(score).__name__
            raise Violation(f"score returned {what}; wanted float64[{len(queue)}]")
        if not np.isfinite(score).all():
            raise Violation(f"score returned {score[~np.isfinite(score)][0]}; wanted finite numbers")
        if not np.array_equal(score, self.policy.score(queue, now)):
            raise Violation("score called twice for the same rows at the same time gave two answers")
        self._unchanged(before, queue._table, "score")
        self.calls += 1
        return score

    def rank(self, rows: Rows) -> Ints | None:
        return self.policy.rank(rows)

    def arrived(self, rows: Rows, now: float) -> None:
        self._watch("arrived", rows, partial(self.policy.arrived, rows, now))

    def ended(self, rows: Rows, now: float) -> None:
        self._watch("ended", rows, partial(self.policy.ended, rows, now))

    def served(self, rows: Rows, tokens: Ints, now: float) -> None:
        given = tokens.copy()
        self._watch("served", rows, partial(self.policy.served, rows, tokens, now))
        if not np.array_equal(given, tokens):
            raise Violation("served changed the tokens that it was told of")
        seqs = rows.seq
        while seqs.max() >= len(self._work):
            self._work = np.concatenate([self._work, np.zeros_like(self._work)])
        for seq in set(seqs.tolist()) - self._begun:
            self.overtaken = max(self.overtaken, int(self._work[seq + 1 :].sum()))
            self._begun.add(seq)
        self._work[seqs] += tokens

    def _watch(self, name: str, rows: Rows, call: Callable[[], None]) -> None:
        before = _snapshot(rows._table)
        call()
        self._unchanged(before, rows._table, name)

    def _unchanged(self, before: dict[str, np.ndarray], table: RequestTable, method: str) -> None:
        for name, column in before.items():
            if not np.array_equal(column, getattr(table, name), equal_nan=column.dtype.kind == "f"):
                raise Violation(f"{method} changed the table's column {name!r}: a policy only reads")


def _snapshot(table: RequestTable) -> dict[str, np.ndarray]:
    return {name: getattr(table, name).copy() for name in table._COLUMNS}


def traffic(count: int, seed: int, load: float = 1.5) -> list[Arrival]:
    """Random requests of all kinds that come `load` times as fast as they can be served; some share a beginning."""
    draw = random.Random(seed)
    beginnings = [[1000 * i + j for j in range(64)] for i in range(4)]
    requests = []
    for index in range(count):
        length = draw.choice([8, 24, 48, 160])
        prompt = (beginnings[draw.randrange(4)] if draw.random() < 0.3 else []) + [10**6 + index] * length
        requests.append(
            Arrival(
                at=0.0,
                prompt=prompt,
                output_len=draw.randint(1, 24),
                request_class=draw.choice(["", "realtime", "batch"]),
                tenant=draw.choice(["a", "a", "a", "b", "c"]),
                priority=draw.randint(-2, 2),
                slo=Slo(deadline=draw.choice([1.0, 5.0, 60.0])) if draw.random() < 0.7 else Slo(),
            )
        )
    tokens = sum(request.prompt_len + request.output_len for request in requests)
    return poisson(requests, load * count / (tokens * STEP_TIMES.per_token), seed)


def _serve(policy: Policy, requests: list[Arrival], config: SchedulerConfig, capacity: Capacity) -> list[tuple]:
    build = partial(Scheduler.of, own=policy)
    run = paced.run(config, requests, step_times=STEP_TIMES, capacity=capacity, build=build)
    return [(one.first_token, one.finished, one.output_len) for one in run.served]


def _order(make: Callable[[], Policy], seed: int) -> str:
    """Every formation, few blocks: valid scores, nothing else touched, the same again, and everyone served."""
    requests = traffic(120, seed)
    wanted = [request.output_len for request in requests]
    calls = 0
    for batching in strategies.FORMATIONS:
        config = SchedulerConfig(batching=batching, max_batch_size=8, max_num_batched_tokens=64, max_wait=0.01)
        watched = Watched(make())
        served = _serve(watched, requests, config, TIGHT)
        if [output_len for *_, output_len in served] != wanted:
            raise Violation(f"with {batching} batching not every request got its tokens")
        if served != _serve(make(), requests, config, TIGHT):
            raise Violation(f"with {batching} batching a second run on the same traffic went otherwise")
        calls += watched.calls
    return f"{calls} orders in {len(strategies.FORMATIONS)} formations, {len(requests)} requests, each run twice"


def _overtaking(make: Callable[[], Policy], seed: int) -> Check:
    """Under sustained overload with ample blocks: what later arrivals are served before a request's first token."""
    policy = make()
    config = SchedulerConfig(batching="continuous", max_batch_size=8, max_num_batched_tokens=64, backfill=False)
    allowed = policy.overtaking + config.seqs * AMPLE.max_model_len // 2 + config.depth * config.max_num_batched_tokens
    wanted = min(MOST_TOKENS, max(40_000, 4 * allowed)) if policy.bounded else 40_000
    requests = traffic(wanted // 85, seed)
    watched = Watched(policy)
    _serve(watched, requests, config, AMPLE)
    if not policy.bounded:
        return Check(
            "overtaking", None, f"claims no bound; up to {watched.overtaken:,} tokens of later work came first"
        )
    detail = f"up to {watched.overtaken:,} tokens of later work came first, {allowed:,} allowed"
    if 2 * allowed > MOST_TOKENS:
        detail += f" (too many to be reached by the {MOST_TOKENS:,} tokens of this test)"
    return Check("bounded overtaking", watched.overtaken <= allowed, detail)


def _cost(make: Callable[[], Policy], waiting: int = 100_000, running: int = 4_096) -> str:
    """The best of a few calls, in milliseconds."""
    policy = make()
    table = RequestTable(waiting)
    requests = traffic(1_000, 0)
    for index in range(waiting):
        one = requests[index % len(requests)]
        params = SamplingParams(max_tokens=one.output_len)
        request = Request(str(index), index, one.prompt, params, index * 1e-3, tenant=one.tenant, slo=one.slo)
        row = table.add(request, one.prompt_len + one.output_len, 2)
        policy.arrived(Rows(table, np.array([row]), 0.0), index * 1e-3)
    queue = Rows(table, np.random.default_rng(0).permutation(waiting), waiting * 1e-3)
    board = Rows(table, np.arange(running), waiting * 1e-3)
    table.phase[board.index] = Phase.RUNNING
    score = _best(lambda: policy.score(queue, queue.now))
    served = _best(lambda: policy.served(board, np.ones(running, np.int32), queue.now))
    return f"score of {waiting:,} waiting {score:.2f} ms, served of {running:,} on board {served:.2f} ms"


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e3)
    return min(times)


def verify(make: Callable[[], Policy], seed: int = 0) -> list[Check]:
    """Every check on fresh objects of a policy. What a policy raises is a failed check, not an error."""

    def guarded(name: str, check: Callable[[], Check]) -> Check:
        try:
            return check()
        except Violation as broken:
            return Check(name, False, str(broken))
        except Exception as error:  # whatever a user's policy may raise
            return Check(name, False, f"{type(error).__name__}: {error}")

    return [
        guarded("order", lambda: Check("order", True, _order(make, seed))),
        guarded("overtaking", lambda: _overtaking(make, seed)),
        guarded("cost", lambda: Check("cost", None, _cost(make))),
    ]
