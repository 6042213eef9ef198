"""Presets: settings that belong together, each with its reason. A flag that is given beside a preset wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IN_MILLISECONDS = ("max_wait", "cluster_wait", "tpot_slo")


@dataclass(frozen=True, slots=True)
class Setting:
    """A field of SchedulerConfig, its value, and why."""

    field: str
    value: Any
    why: str

    @property
    def flag(self) -> str:
        """As it is spelled on the command line."""
        name = self.field.replace("_", "-")
        if isinstance(self.value, bool):
            return f"--{name}" if self.value else f"--no-{name}"
        if self.field in IN_MILLISECONDS:
            return f"--{name}-ms {self.value * 1e3:g}"
        return f"--{name} {self.value}"


IN_FLIGHT = Setting("batching", "inflight", "who comes while a step runs boards the next one")

PRESETS: dict[str, tuple[Setting, ...]] = {
    "realtime": (
        IN_FLIGHT,
        Setting("policy", "default", "no short request waits behind a giant, and no giant for ever"),
        Setting("budget", "latency", "prompts get what the promise to those who read leaves of a step"),
        Setting("tpot_slo", 0.05, "20 tokens a second: faster than anyone reads"),
        Setting("max_batch_size", 32, "fewer rows make shorter steps"),
    ),
    "voice": (
        IN_FLIGHT,
        Setting("policy", "aged:edf", "whose deadline is nearest speaks first; none is forgotten"),
        Setting("budget", "latency", "speech must not falter when a new caller's prompt comes"),
        Setting("tpot_slo", 0.1, "10 tokens a second: twice as fast as speech"),
        Setting("max_batch_size", 16, "the first word counts, and shorter steps bring it sooner"),
        Setting("kv_reservation", "predicted", "nobody who speaks should have to pause for want of blocks"),
        Setting("max_num_partial_prefills", 2, "prompts that share a step delay each other's first word"),
    ),
    "batch": (
        IN_FLIGHT,
        Setting("policy", "aged:lpm", "those whose beginning is cached come while it is; none is forgotten"),
        Setting("budget", "decode-first", "no promise to keep, but a full board stays full"),
        Setting("max_batch_size", 256, "weights are read once a step, for however many rows"),
        Setting("max_num_batched_tokens", 2048, "prompts in few large chunks use the device best"),
    ),
    "mixed": (
        IN_FLIGHT,
        Setting("policy", "classes", "realtime and batch requests queue apart, and batch fills what realtime leaves"),
        Setting("budget", "latency", "a batch prompt must not hold up those who read"),
        Setting("tpot_slo", 0.05, "20 tokens a second: faster than anyone reads"),
        Setting("max_batch_size", 64, "room for batch rows beside the realtime ones"),
    ),
    "offline": (
        IN_FLIGHT,
        Setting("policy", "lpm", "all are there from the start, so shared beginnings may go first without harm"),
        Setting("budget", "prefill-first", "nobody reads along: the board fills as fast as it can"),
        Setting("max_batch_size", 256, "weights are read once a step, for however many rows"),
        Setting("max_num_batched_tokens", 4096, "prompts in few large chunks use the device best"),
    ),
}
