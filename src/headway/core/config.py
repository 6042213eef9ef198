"""How the core is set up. Flags of the same names set these; the names are vLLM's where vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from headway.core.tenants import Tenant

PADDED = ("static", "dynamic")
"""Batchings whose groups board at once and are computed as one rectangle."""

ADMISSIONS = ("accept", "relegate", "refuse")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step.

    Three limits are kept apart: `max_batch_size`, rows computed in one step; `max_num_seqs`, requests admitted and
    holding KV (None: twice the batch); `burst_size`, admissions in one step (None: no bound). `max_num_batched_tokens`
    is a step's token budget. `max_num_partial_prefills` prompts may share it in chunks; with `chunked_prefill` off a
    prompt is computed whole or not at all. `depth` steps may be launched before the first is collected.

    The strategies, by the names that `strategies.py` knows: `batching`, when requests may join (`static_timeout` and
    `max_wait`, in seconds, are how long an unfull group is waited for by the static and the dynamic one); `policy`, who
    goes first; `budget`, how many tokens each gets. `backfill`: one that does not fit is passed by small ones that do.
    `prefix_caching`: the known beginning of a prompt is not computed again. `preemption`: what becomes of the KV of who
    leaves under pressure ("swap", "recompute", or "auto", whichever is cheaper each time); `kv_reservation`: what
    admission keeps free for answers ("optimistic" nothing, "predicted" what they will probably need, "full" all that
    max_tokens allows).

    `wait_window`: "fixed" waits `max_wait`; "adaptive" waits less where that gains nothing. `length_clusters` puts
    requests of like lengths into one padded group; none is passed over for that longer than `cluster_wait` seconds.
    `max_overtaking`: tokens of later arrivals that the default policy and aged ones serve ahead of a request before it
    goes first, and by which a tenant may be behind the others with the fair policy to catch up on later (None: as many
    as 64 full steps compute).
    `tpot_slo`: seconds per token that the latency budget keeps for those who decode and were promised nothing else.
    `admission`: what becomes of a request that was promised something which, as is predicted when it comes, cannot be
    kept: "accept" it like any other, "relegate" it behind those that can, or "refuse" it.
    `tenants`: by name, those who have a weight (for the fair policy) or a limit of their own.
    """

    batching: str = "inflight"
    policy: str = "default"
    budget: str = "decode-first"
    static_timeout: float = 1.0
    max_wait: float = 0.05
    wait_window: str = "fixed"
    length_clusters: bool = False
    cluster_wait: float = 30.0
    max_overtaking: int | None = None
    tpot_slo: float = 0.05
    admission: str = "accept"
    backfill: bool = True
    prefix_caching: bool = True
    preemption: str = "auto"
    kv_reservation: str = "optimistic"
    tenants: Mapping[str, Tenant] = field(default_factory=dict)

    max_batch_size: int = 64
    max_num_seqs: int | None = None
    burst_size: int | None = None
    max_num_batched_tokens: int = 512
    chunked_prefill: bool = True
    max_num_partial_prefills: int = 4
    depth: int = 2

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            if isinstance(value, int) and value >= 2**31:
                raise ValueError(f"{name} must be below 2**31, got {value}")
        for name in ("max_batch_size", "max_num_batched_tokens", "max_num_partial_prefills"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("static_timeout", "max_wait", "cluster_wait"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0 seconds, got {getattr(self, name)}")
        if self.admission not in ADMISSIONS:
            raise ValueError(f"admission must be one of {', '.join(ADMISSIONS)}, got {self.admission!r}")
        if not self.tpot_slo > 0:
            raise ValueError(f"tpot_slo must be more than 0 seconds, got {self.tpot_slo}")
        if self.budget == "latency" and not self.chunked_prefill:
            raise ValueError("the latency budget computes prompts in chunks: choose another, or chunked_prefill")
        if self.max_overtaking is not None and self.max_overtaking < 1:
            raise ValueError(f"max_overtaking must be at least 1 token, got {self.max_overtaking}")
        if self.depth not in (1, 2):
            raise ValueError(f"depth must be 1 or 2, got {self.depth}")
        if self.max_num_batched_tokens < self.max_batch_size:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is smaller than max_batch_size "
                f"({self.max_batch_size}): a full batch could not decode one token each. Raise one or lower the other."
            )
        if self.max_num_seqs is not None and self.max_num_seqs < self.max_batch_size:
            raise ValueError(
                f"max_num_seqs ({self.max_num_seqs}) is smaller than max_batch_size ({self.max_batch_size}): "
                "the batch could never be full. Raise one or lower the other."
            )
        if self.burst_size is not None and self.burst_size < 1:
            raise ValueError(f"burst_size must be at least 1, got {self.burst_size}")
        if self.batching in PADDED:
            self._check_padded()

    def _check_padded(self) -> None:
        """What does not go with a group that boards at once and is computed as one rectangle."""
        if self.budget == "latency":
            raise ValueError(
                f"the latency budget cuts prompts, but batching {self.batching} computes a whole group at once, and "
                "tpot_slo could not be kept: choose another budget, or continuous or inflight batching"
            )
        if self.burst_size is not None and self.burst_size < self.max_batch_size:
            raise ValueError(
                f"burst_size ({self.burst_size}) is smaller than max_batch_size ({self.max_batch_size}): with batching "
                f"{self.batching} a group boards at once, so none could be full. Raise one or lower the other."
            )

    def check_memory(self, sized: SchedulerConfig) -> None:
        """Raises ValueError where memory that was sized for `sized` does not do for this."""
        for name in ("seqs", "prefix_caching"):
            if getattr(self, name) != getattr(sized, name):
                raise ValueError(f"{name} was set to {getattr(sized, name)} at the start and cannot change")
        if self.max_num_batched_tokens > sized.max_num_batched_tokens:
            raise ValueError(
                f"max_num_batched_tokens cannot be {self.max_num_batched_tokens}: memory was sized for "
                f"{sized.max_num_batched_tokens} at the start"
            )

    @property
    def overtaking(self) -> int:
        """Tokens of later arrivals that may be served ahead of a request."""
        return self.max_overtaking if self.max_overtaking is not None else 64 * self.max_num_batched_tokens

    @property
    def tenant_weights(self) -> dict[str, float]:
        """Of those tenants that have one."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}

    @property
    def seqs(self) -> int:
        """Requests that may hold KV at a time."""
        return self.max_num_seqs if self.max_num_seqs is not None else 2 * self.max_batch_size
