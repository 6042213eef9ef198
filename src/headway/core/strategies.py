"""The choices of a scheduler, and the one place where their names become objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from headway.core import policies
from headway.core.budget import Budget, DecodeFirst, LatencyBound, PrefillFirst, Unbounded, WholePrompts
from headway.core.clusters import Clustered
from headway.core.config import SchedulerConfig
from headway.core.formation import Continuous, Formation, InFlight, Padded
from headway.core.preemption import LeastLoss, Preemption
from headway.core.reservation import Full, Optimistic, Predicted, Reservation
from headway.core.step_time import StepTimeModel
from headway.core.window import AdaptiveWindow, FixedWindow, WaitWindow

T = TypeVar("T")

FORMATIONS: dict[str, Callable[[SchedulerConfig], Formation]] = {
    "static": lambda config: Padded(config.max_batch_size, FixedWindow(config.static_timeout)),
    "dynamic": lambda config: Padded(config.max_batch_size, window(config)),
    "continuous": lambda config: Continuous(),
    "inflight": lambda config: InFlight(),
}
WINDOWS: dict[str, Callable[[SchedulerConfig], WaitWindow]] = {
    "fixed": lambda config: FixedWindow(config.max_wait),
    "adaptive": lambda config: AdaptiveWindow(config.max_wait),
}
BUDGETS: dict[str, Callable[[SchedulerConfig, StepTimeModel], Budget]] = {
    "decode-first": lambda config, model: (
        DecodeFirst(config.max_num_partial_prefills) if config.chunked_prefill else WholePrompts()
    ),
    "prefill-first": lambda config, model: PrefillFirst(),
    "latency": lambda config, model: LatencyBound(model, config.tpot_slo, config.max_num_partial_prefills),
}
PREEMPTIONS: dict[str, Callable[[StepTimeModel], Preemption]] = {
    "auto": LeastLoss,
    "recompute": lambda model: LeastLoss(model, swap=False),
    "swap": lambda model: LeastLoss(model, swap=True),
}
RESERVATIONS: dict[str, Callable[[], Reservation]] = {"optimistic": Optimistic, "predicted": Predicted, "full": Full}

FORMATION_FIELDS = ("batching", "static_timeout", "max_wait", "wait_window", "max_batch_size")
POLICY_FIELDS = ("policy", "overtaking", "admission", "length_clusters", "cluster_wait", "tenant_weights")
"""What of the configuration each is made from."""


@dataclass(slots=True)
class Strategies:
    """Whoever needs a choice looks here each time, so that all can change while requests are in flight."""

    config: SchedulerConfig
    formation: Formation = field(default_factory=Continuous)
    policy: policies.Policy = field(default_factory=policies.Fcfs)
    budget: Budget = field(default_factory=DecodeFirst)
    preemption: Preemption = field(default_factory=lambda: LeastLoss(StepTimeModel()))
    reservation: Reservation = field(default_factory=Optimistic)

    @classmethod
    def of(cls, config: SchedulerConfig, model: StepTimeModel, own: policies.Policy | None = None) -> Strategies:
        """Those that `config` names; `own` is a policy to use instead of the named one.

        Raises:
            ValueError: one of the names is unknown, or two do not go together; the message says which.
        """
        return cls(
            config,
            formation(config),
            own or policy(config, model),
            budget(config, model),
            _known("preemption", PREEMPTIONS, config.preemption)(model),
            _known("kv_reservation", RESERVATIONS, config.kv_reservation)(),
        )

    @property
    def budget_limit(self) -> str:
        """The setting that bounds a step's tokens."""
        return "tpot_slo" if isinstance(self.budget, LatencyBound) else "max_num_batched_tokens"

    def follow(self, config: SchedulerConfig, model: StepTimeModel) -> None:
        """From now on as `config` says. Formation and policy are kept, with all that they have learnt, where the
        configuration of them is the same. Raises ValueError as `of` does; nothing has changed then."""
        new = Strategies.of(config, model)
        if not _alike(config, self.config, FORMATION_FIELDS):
            self.formation = new.formation
        if not _alike(config, self.config, POLICY_FIELDS):
            self.policy = new.policy
        self.config, self.budget = config, new.budget
        self.preemption, self.reservation = new.preemption, new.reservation


def _alike(one: SchedulerConfig, other: SchedulerConfig, names: tuple[str, ...]) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in names)


def formation(config: SchedulerConfig) -> Formation:
    """Raises ValueError where there is no formation of this name."""
    return _known("batching", FORMATIONS, config.batching)(config)


def window(config: SchedulerConfig) -> WaitWindow:
    """Raises ValueError where there is no window of this name."""
    return _known("wait_window", WINDOWS, config.wait_window)(config)


def budget(config: SchedulerConfig, model: StepTimeModel) -> Budget:
    """A padded group is computed as one rectangle, so no budget cuts it. Raises ValueError for an unknown name."""
    made = _known("budget", BUDGETS, config.budget)(config, model)
    return Unbounded() if formation(config).lingers else made


def policy(config: SchedulerConfig, model: StepTimeModel) -> policies.Policy:
    """Raises ValueError for an unknown name, and for length clusters where no group is padded."""
    made = policies.make(config.policy, model, config.overtaking, config.tenant_weights)
    if config.admission == "relegate":
        made = policies.Relegating(made, model)
    if not config.length_clusters:
        return made
    if not formation(config).lingers:
        raise ValueError(f"length_clusters is for padded batching (static, dynamic); {config.batching} pads nothing")
    return Clustered(made, config.cluster_wait)


def _known(what: str, there_are: Mapping[str, T], name: str) -> T:
    if name not in there_are:
        raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(sorted(there_are))}")
    return there_are[name]
