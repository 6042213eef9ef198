"""`headway compare`: one workload through every way of batching and every order of service, side by side.

The arms differ in the scheduler's configuration only. They run on a real model in this process or, paced, on a virtual
clock; the driver and what is measured are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from headway.core import policies
from headway.core.config import SchedulerConfig
from headway.core.scheduler import Scheduler
from headway.engine.config import EngineConfig
from headway.engine.loop import EngineLoop
from headway.engine.startup import BUILD_LOOP, Report, make_loop, silent
from headway.lab import paced
from headway.lab.drive import Driver, Run, Served, nobody
from headway.lab.traffic import Arrival

Watch = Callable[[int], None]
"""Told after each step how many requests have ended."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration. `name` is its key, `title` what people read, `group` what it is compared in; `by_class` where
    the order favours a class."""

    name: str
    title: str
    group: str
    config: SchedulerConfig
    by_class: bool = False


BATCHING = "Ways of batching, first come first served"
ORDER = "Orders of service, in-flight batching"


def arms(max_num_batched_tokens: int = 256) -> list[Arm]:
    """Static, dynamic and continuous batching; then each step adds one thing; then every other order of service."""
    alone = SchedulerConfig(
        batching="continuous",
        policy="fcfs",
        chunked_prefill=False,
        depth=1,
        max_batch_size=32,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    chunked = replace(alone, chunked_prefill=True)
    inflight = replace(chunked, batching="inflight", depth=2)
    ladder = [
        Arm("static", "Static(32)", BATCHING, replace(alone, batching="static")),
        Arm("dynamic", "Dynamic(64)", BATCHING, replace(alone, batching="dynamic", max_batch_size=64)),
        Arm("continuous", "Continuous", BATCHING, alone),
        Arm("chunked", "+ Chunked prefill", BATCHING, chunked),
        Arm("inflight", "+ In-flight", BATCHING, inflight, by_class=True),
        Arm("priority", "+ Priority", ORDER, replace(inflight, policy="priority"), by_class=True),
    ]
    others = [
        Arm(name, name, ORDER, replace(inflight, policy=name), by_class=name == "classes")
        for name in policies.POLICIES
        if name not in ("fcfs", "priority")
    ]
    return ladder + others


class Runner(Protocol):
    """Serves traffic under a configuration; `users` makes it a closed loop."""

    def __call__(
        self, config: SchedulerConfig, traffic: Sequence[Arrival], users: int | None = None, watch: Watch = ...
    ) -> Run: ...


class Paced:
    """On a virtual clock, with given step times."""

    def __init__(self, step_times: paced.StepTimes = paced.SMOLLM2) -> None:
        self.step_times = step_times

    def __call__(
        self, config: SchedulerConfig, traffic: Sequence[Arrival], users: int | None = None, watch: Watch = nobody
    ) -> Run:
        return paced.run(config, traffic, step_times=self.step_times, users=users, watch=watch)


class Live:
    """On a real model in this process, in real time. The model is loaded once; every run gets a scheduler of its own.

    `config.scheduler` bounds what runs may ask for: sequences, and tokens in a step. After each run `step_time` is what
    its scheduler has learnt about the device.

    Raises:
        ModelError: the model cannot be read or does not fit.
    """

    def __init__(
        self, config: EngineConfig, path: str, report: Report = silent, loop_factory: str = BUILD_LOOP
    ) -> None:
        self._executor = make_loop(loop_factory, config, path, report).executor
        self.capacity = self._executor.capacity()
        self.step_times: list[paced.StepTimes] = []

    def __call__(
        self, config: SchedulerConfig, traffic: Sequence[Arrival], users: int | None = None, watch: Watch = nobody
    ) -> Run:
        holds = self.capacity
        if config.seqs > holds.max_num_seqs:
            raise ValueError(f"{config.seqs} sequences were asked for, but the executor has {holds.max_num_seqs} slots")
        scheduler = Scheduler.of(
            config,
            holds.num_blocks,
            holds.block_size,
            holds.max_model_len,
            num_host_blocks=holds.num_host_blocks,
            spare_slots=holds.spare_slots,
        )
        loop = EngineLoop(scheduler, self._executor, time.monotonic)
        done = Driver(loop, traffic, _sleep_until, users=users, watch=watch).run()
        self.step_times.append(paced.StepTimes.of(scheduler.step_time))
        return done

    def close(self) -> None:
        self._executor.close()


def _sleep_until(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one arm, or of one class in it. Seconds, tokens per second, shares of one."""

    requests: int
    output_throughput: float
    ttft_p50: float
    ttft_p99: float
    e2e_p50: float
    e2e_p99: float
    attainment: float | None
    """The share of promises that were kept, where there were any."""

    @classmethod
    def of(cls, run: Run) -> Figures:
        latencies = [run.percentile(name, percent) for name in ("ttft", "e2e") for percent in (50, 99)]
        return cls(len(run.served), run.output_throughput, *latencies, run.attainment)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one arm brought."""

    arm: Arm
    run: Run

    @property
    def figures(self) -> Figures:
        return Figures.of(self.run)

    def by_class(self) -> dict[str, Figures]:
        return {name: Figures.of(self.run.of_class(name)) for name in classes(self.run)}

    def document(self) -> dict[str, Any]:
        """What JSON holds: configuration, figures, and the samples from which they can be computed again."""
        run = self.run
        return {
            "name": self.arm.name,
            "title": self.arm.title,
            "config": asdict(self.arm.config),
            "figures": asdict(self.figures)
            | {
                "itl_p50": run.percentile("itl", 50),
                "itl_p99": run.percentile("itl", 99),
                "batch_efficiency": run.stats.batch_efficiency,
                "padding_waste": run.padding_waste,
                "busy": run.busy,
                "utilisation": run.utilisation,
                "duration": run.duration,
                "kv_fragmentation": run.kv_fragmentation,
                "host_gap": run.host_gap,
                "goodput": run.goodput,
            },
            "by_class": {name: asdict(figures) for name, figures in self.by_class().items()},
            "stats": asdict(run.stats),
            "state_times": [one.state_times for one in run.served],
            "samples": [sample(one) for one in run.served],
        }


def sample(one: Served) -> dict[str, Any]:
    """One request's times (seconds after the start), lengths and class."""
    return {
        "arrival": round(one.arrival, 6),
        "first_token": round(one.first_token, 6),
        "finished": round(one.finished, 6),
        "prompt_len": one.request.prompt_len,
        "output_len": one.output_len,
        "class": one.request.request_class,
        "preemptions": one.preemptions,
    }


def classes(run: Run) -> list[str]:
    """The classes of the requests, in the order of their priority."""
    found = {one.request.request_class: one.request.priority for one in run.served}
    return sorted(found, key=lambda name: (found[name], name))


def compare(
    runner: Runner, chosen: Iterable[Arm], traffic: Sequence[Arrival], begin: Callable[[Arm], Watch]
) -> list[Outcome]:
    """Every arm over the same traffic; `begin(arm)` is told of each and returns who watches it."""
    return [Outcome(arm, runner(arm.config, traffic, None, begin(arm))) for arm in chosen]
