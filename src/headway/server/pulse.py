"""One line a second about what the server does, and what to change where something is wasted."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.core.accounting import State
from headway.core.config import SchedulerConfig
from headway.engine.api import EngineStats
from headway.server.tally import Tally

if TYPE_CHECKING:
    from headway.engine.api import Engine

LONG = 10
"""Beats with work of which advice is made: a shorter lull says nothing."""
SILENCE = 60.0
"""Seconds before the same advice is given again."""
LEAST_EFFICIENCY, MOST_FRAGMENTATION, MOST_PADDING = 0.5, 0.3, 0.3
FULL = 0.5
"""Share of the KV blocks from which on it matters what they hold."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What happened between two snapshots, `seconds` apart. Counts are tokens, rows and steps of that time; `stats` is
    the later snapshot."""

    stats: EngineStats
    seconds: float
    steps: int
    rows: int
    batched: int
    padding: int
    generated: int
    gap: float
    preempted: int
    lost: int

    @classmethod
    def between(cls, old: EngineStats, new: EngineStats, generated: int, seconds: float) -> Beat:
        return cls(
            new,
            seconds,
            new.num_steps - old.num_steps,
            new.num_batched_rows - old.num_batched_rows,
            new.num_batched_tokens - old.num_batched_tokens,
            new.num_pad_tokens - old.num_pad_tokens,
            generated,
            new.host_gap - old.host_gap,
            new.num_preemptions - old.num_preemptions,
            new.num_recomputed_tokens - old.num_recomputed_tokens,
        )

    def line(self, max_batch_size: int) -> str:
        """All of it, for a person."""
        stats, seconds = self.stats, self.seconds
        lost = f" ({_count(self.lost)} tokens again)" if self.lost else ""
        return (
            f"running {stats.num_running}{_reasons(stats.paused_by_reason)} "
            f"waiting {stats.num_waiting}{_reasons(stats.waiting_by_reason)}"
            f" | {_count(self.generated / seconds)} tok/s out, "
            f"{_count(max(0, self.batched - self.generated) / seconds)} in"
            f" | batch {_share(self.rows, self.steps * max_batch_size)} kv {stats.kv_usage:.0%} "
            f"frag {stats.kv_fragmentation:.0%} pad {_share(self.padding, self.padding + self.batched)} "
            f"gap {min(1.0, self.gap / seconds):.0%} preempted {self.preempted}{lost}"
        )


def _reasons(counts: Mapping[str, int]) -> str:
    """In brackets, the most frequent first."""
    parts = [f"{_short(reason)} {count}" for reason, count in sorted(counts.items(), key=lambda pair: -pair[1])]
    return f" ({', '.join(parts)})" if parts else ""


def _short(reason: str) -> str:
    return reason.removeprefix("wait_")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _count(value: float) -> str:
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k"


class Advice:
    """Looks at the latest beats, and says what to change. Pure: beats and times in, sentences out.

    A half-empty batch is a fault only where somebody waits meanwhile; empty room in KV blocks only where blocks are
    short.
    """

    def __init__(self) -> None:
        self._beats: deque[Beat] = deque(maxlen=LONG)
        self._said: dict[str, float] = {}

    def note(self, beat: Beat, config: SchedulerConfig, block_size: int, now: float) -> list[str]:
        """One beat later; beats in which nothing was computed do not count."""
        if not beat.steps:
            return []
        self._beats.append(beat)
        if len(self._beats) < LONG:
            return []
        beats = list(self._beats)
        found = [*_of_batch(beats, config), *_of_blocks(beats, config, block_size), *_of_padding(beats, config)]
        new = [(key, text) for key, text in found if now - self._said.get(key, -SILENCE) >= SILENCE]
        self._said |= {key: now for key, _ in new}
        return [text for _, text in new]


def _of_batch(beats: Sequence[Beat], config: SchedulerConfig) -> Iterator[tuple[str, str]]:
    efficiency = sum(b.rows for b in beats) / (sum(b.steps for b in beats) * config.max_batch_size)
    if efficiency >= LEAST_EFFICIENCY or not all(beat.stats.num_waiting for beat in beats):
        return
    waits: Counter[str] = Counter()
    for beat in beats:
        waits.update(beat.stats.waiting_by_reason)
    reason, count = waits.most_common(1)[0]
    remedy = _remedy(reason, beats[-1].stats.queue_limit)
    if remedy is not None:
        yield (
            "batch",
            f"batch efficiency {efficiency:.0%}, while {count / len(beats):.0f} wait ({_short(reason)}): {remedy}",
        )


def _remedy(reason: str, limit: str) -> str | None:
    """What lets those in who wait for this; None where no setting does."""
    match reason, limit:
        case State.WAIT_ROW.label, "max_num_seqs":
            return "raise --max-num-seqs"
        case State.WAIT_ROW.label, "burst_size":
            return "raise --burst-size"
        case State.WAIT_BUDGET.label, "tpot_slo":
            return "raise --tpot-slo-ms, or lower --max-batch-size to what it allows"
        case ((State.WAIT_BUDGET.label | State.WAIT_ROW.label), _):
            return "raise --max-num-batched-tokens, or lower --max-batch-size"
        case ((State.WAIT_BLOCKS.label | State.PREEMPTED.label), _):
            return "raise --kv-cache-memory, or lower --max-batch-size to what fits"
        case State.WAIT_WINDOW.label, _:
            return "use --batching inflight, or lower --max-wait-ms or --static-timeout"
    return None


def _of_blocks(beats: Sequence[Beat], config: SchedulerConfig, block_size: int) -> Iterator[tuple[str, str]]:
    fragmentation = sum(beat.stats.kv_fragmentation for beat in beats) / len(beats)
    short = all(beat.stats.kv_usage >= FULL for beat in beats)
    if fragmentation <= MOST_FRAGMENTATION or not short:
        return
    if config.batching in ("static", "dynamic"):
        remedy = "use --batching inflight: a padded group holds room for the longest of it"
    elif block_size > 1:
        remedy = f"lower --block-size, now {block_size}"
    else:
        return
    yield "blocks", f"{fragmentation:.0%} of the tokens that held KV blocks have room for are empty: {remedy}"


def _of_padding(beats: Sequence[Beat], config: SchedulerConfig) -> Iterator[tuple[str, str]]:
    padding, batched = sum(beat.padding for beat in beats), sum(beat.batched for beat in beats)
    if padding > MOST_PADDING * (padding + batched):
        remedy = "use --batching inflight" + ("" if config.length_clusters else ", or --length-clusters")
        yield "padding", f"{padding / (padding + batched):.0%} of the computed tokens are padding: {remedy}"


class Pulse:
    """Writes a line for each beat in which there was work. `write` gets lines without their ends."""

    def __init__(self, engine: Engine, tally: Tally, write: Callable[[str], None], now: float) -> None:
        self._engine = engine
        self._tally = tally
        self._write = write
        self._advice = Advice()
        self._stats, self._generated, self._at = engine.stats, tally.generation_tokens, now

    def beat(self, now: float) -> None:
        """About a second after the last one."""
        engine, stats = self._engine, self._engine.stats
        generated, self._generated = self._tally.generation_tokens - self._generated, self._tally.generation_tokens
        beat = Beat.between(self._stats, stats, generated, max(now - self._at, 1e-3))
        self._stats, self._at = stats, now
        if not (beat.steps or stats.num_running or stats.num_waiting):
            return
        config = engine.scheduler_config
        self._write(beat.line(config.max_batch_size))
        for text in self._advice.note(beat, config, engine.capacity.block_size, now):
            self._write(f"warning: {text}")
