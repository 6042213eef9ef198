"""From the names of strategies to the objects: the one place where flags become formation, policy and budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from headway.core import policies
from headway.core.budget import Budget, DecodeFirst, LatencyBound, PrefillFirst, Unbounded, WholePrompts
from headway.core.clusters import Clustered
from headway.core.config import SchedulerConfig
from headway.core.formation import Continuous, Formation, InFlight, Padded
from headway.core.kv_cache import BlockPool
from headway.core.prefix import PrefixIndex
from headway.core.scheduler import Scheduler
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
    made = policies.make(config.policy, model, config.overtaking)
    if not config.length_clusters:
        return made
    if not formation(config).lingers:
        raise ValueError(f"length_clusters is for padded batching (static, dynamic); {config.batching} pads nothing")
    return Clustered(made, config.cluster_wait)


def make_scheduler(
    config: SchedulerConfig,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    *,
    secret: bytes = b"",
    own: policies.Policy | None = None,
) -> Scheduler:
    """A scheduler of the strategies that `config` names, over so many KV blocks.

    `secret` is the key of the prefix index; `own` is a policy to use instead of the one that is named.

    Raises:
        ValueError: one of the names is unknown; the message lists those there are.
    """
    prefixes = PrefixIndex(num_blocks, block_size, secret) if config.prefix_caching else None
    model = StepTimeModel()
    return Scheduler(
        config,
        BlockPool(num_blocks, block_size, config.seqs, max_model_len, prefixes),
        max_model_len,
        formation=formation(config),
        policy=own or policy(config, model),
        budget=budget(config, model),
        step_time=model,
    )


def _known(what: str, there_are: Mapping[str, T], name: str) -> T:
    if name not in there_are:
        raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(sorted(there_are))}")
    return there_are[name]
