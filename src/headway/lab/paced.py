"""Paced runs: the real scheduler and the real loop on a virtual clock, with step times measured from a real model.

Nothing is computed, so thousands of requests take seconds; what is decided, and when, is what a live engine whose
steps take these times would decide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headway.core.batch import Admission, Batch
from headway.core.config import SchedulerConfig
from headway.core.load import STRATA, Load
from headway.core.scheduler import Scheduler
from headway.core.step_time import StepTimeModel
from headway.engine.loop import EngineLoop
from headway.executors.base import Capacity
from headway.executors.simulated import SimulatedExecutor, VirtualClock
from headway.lab.drive import EOS, Driver, Run, nobody
from headway.lab.traffic import Arrival

GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without their whole part, spread evenly over [0, 1)."""

BuildScheduler = Callable[..., Scheduler]
"""(config, num_blocks, block_size, max_model_len), and num_host_blocks and spare_slots by name where there are any: as
`Scheduler.of`, or one with a part of one's own."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that a batch takes, by the features of `core/step_time.py`.

    base + per_token * tokens + per_attended * sum of chunk x context + per_row * rows + per_kv_token * KV tokens read
    + per_token_over * tokens beyond `saturation`; times one of its stratum's `ratios`, where there are any: how far
    steps lay from this formula. They are taken in turn at equal distances, so that every one comes as often.
    """

    base: float
    per_token: float = 0.0
    per_attended: float = 0.0
    per_row: float = 0.0
    per_kv_token: float = 0.0
    per_token_over: float = 0.0
    saturation: int = 1
    ratios: Sequence[Sequence[float]] = ((),) * len(STRATA)

    @classmethod
    def of(cls, model: StepTimeModel) -> StepTimes:
        """What a live engine's model has learnt, and how far its steps lay from that: the fit is to relative errors, so
        without them the sum of the times would come out too small, and the slow steps not at all."""
        ratios = tuple(tuple(sorted(model.residuals(stratum).tolist())) for stratum in range(len(STRATA)))
        return cls(*model.coefficients.tolist(), saturation=model.saturation, ratios=ratios)

    def __call__(self, batch: Batch) -> float:
        ratios = self.ratios[batch.load.stratum]
        seconds = self._typical(batch.load)
        return seconds * ratios[int(len(ratios) * (batch.step_id * GOLDEN % 1.0))] if ratios else seconds

    def _typical(self, load: Load) -> float:
        return (
            self.base
            + self.per_token * load.tokens
            + self.per_attended * load.attended
            + self.per_row * load.rows
            + self.per_kv_token * load.kv_tokens
            + self.per_token_over * max(0.0, load.tokens - self.saturation)
        )


SMOLLM2 = StepTimes(
    base=83.3e-3,
    per_token=1.67e-3,
    per_attended=1.18e-6,
    per_row=1.36e-3,
    per_kv_token=6.36e-6,
    per_token_over=1.87e-3,
    saturation=8,
)
"""SmolLM2-135M in float32 on one thread of a Zen 3 core without AVX-512 that was shared with others: 27 compositions of
1 to 64 rows, 1 to 512 tokens and 33 to 32,832 KV tokens; processor time, the better of two; mean error of the fit
4.5 %. Other machines differ mostly by a factor. Where a real model has just run, `StepTimes.of` it is better."""

AMPLE = Capacity(num_blocks=20_000, block_size=16, max_num_seqs=0, max_model_len=8192)
"""KV for 320,000 tokens: blocks are no limit. Sequences are as many as the configuration says."""


def run(
    config: SchedulerConfig,
    traffic: Sequence[Arrival],
    *,
    step_times: Callable[[Batch], float] = SMOLLM2,
    capacity: Capacity = AMPLE,
    users: int | None = None,
    build: BuildScheduler = Scheduler.of,
    watch: Callable[[int], None] = nobody,
    copy_time: float = 0.0,
) -> Run:
    """Serves the traffic to its end, as an open loop, or with `users` as a closed one (see `Driver`). `copy_time`:
    seconds that copying a KV block to or from the host's memory takes, of which `capacity` says how much there is.

    Raises:
        RequestError: a request that `capacity` can never hold.
    """
    clock = VirtualClock()
    if capacity.num_host_blocks or capacity.spare_slots:
        build = partial(build, num_host_blocks=capacity.num_host_blocks, spare_slots=capacity.spare_slots)
    scheduler = build(config, capacity.num_blocks, capacity.block_size, capacity.max_model_len)

    def natural(new: Admission) -> int:
        return traffic[new.handle].output_len

    holds = replace(capacity, max_num_seqs=config.seqs)
    executor = SimulatedExecutor(holds, step_times, clock, output_len=natural, eos=EOS, copy_time=copy_time)
    return Driver(EngineLoop(scheduler, executor, clock), traffic, clock.advance_to, users, watch).run()


def request_rate(
    config: SchedulerConfig,
    requests: Sequence[Arrival],
    *,
    step_times: Callable[[Batch], float] = SMOLLM2,
    capacity: Capacity = AMPLE,
) -> float:
    """Capacity C: requests per second finished in a closed loop with the rows full (see `Run.request_rate`)."""
    users = config.seqs
    return run(config, requests, step_times=step_times, capacity=capacity, users=users).request_rate(users)
