"""What the core exchanges: batches out, outputs in, events out. Plain arrays, so that they can be sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headway.core.load import NOTHING, Load
from headway.core.request import FinishReason, SamplingParams
from headway.core.timeline import Span

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes an executor slot in this step, new or resumed: all that the executor must remember of it.

    `token_ids` int32[length]: prompt and, when resumed, the tokens generated so far. `prompt_len` tells them apart.
    """

    slot: int
    handle: int
    token_ids: Ints
    prompt_len: int
    params: SamplingParams
    stop_token_ids: Sequence[int]
    choice: int


NO_IDS: Ints = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Swaps:
    """KV blocks to copy, int32[k] each: device block out_device[i] to host block out_host[i], and host block in_host[i]
    to device block in_device[i].

    All that go out are copied before any comes in, and both before anything of the step is computed.
    """

    out_device: Ints
    out_host: Ints
    in_device: Ints
    in_host: Ints

    def __len__(self) -> int:
        return len(self.out_device) + len(self.in_device)


NO_SWAPS = Swaps(NO_IDS, NO_IDS, NO_IDS, NO_IDS)


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. Row i computes positions [starts[i], starts[i] + num_tokens[i]) of the sequence in slots[i].

    rows int64[n]: the core's row numbers (opaque to executors). slots int32[n]: executor slots in [0, max_num_seqs).
    samples bool[n]: the row's last position yields a token, which the executor writes to its own copy of the sequence
    at starts + num_tokens, so that a following step may read it before the host has seen it.
    pad_tokens int32[n]: throwaway tokens that a padded formation really computes.
    block_slots, block_index, block_ids int32[m]: block tables' new entries, table[slot][index] = id, to be applied
    (after `admitted`, whose slots start with empty tables) before the pass.
    swaps: what is copied to and from the host's memory before that.
    load: what the pass costs the device; it follows from the rest, and is worked out where it is not given.
    """

    step_id: int
    rows: Longs
    slots: Ints
    starts: Ints
    num_tokens: Ints
    samples: Bools
    pad_tokens: Ints
    admitted: tuple[Admission, ...]
    block_slots: Ints
    block_index: Ints
    block_ids: Ints
    swaps: Swaps = NO_SWAPS
    load: Load = NOTHING

    def __post_init__(self) -> None:
        if self.load is NOTHING:
            object.__setattr__(self, "load", Load.of(self.starts, self.num_tokens, self.pad_tokens))

    @property
    def total_tokens(self) -> int:
        return int(self.num_tokens.sum())


def merge(first: Batch, late: Batch) -> Batch:
    """One batch of two with the same step_id and no row in common."""
    names = [
        "rows",
        "slots",
        "starts",
        "num_tokens",
        "samples",
        "pad_tokens",
        "block_slots",
        "block_index",
        "block_ids",
    ]
    arrays: dict[str, Any] = {name: np.concatenate([getattr(first, name), getattr(late, name)]) for name in names}
    names = [field.name for field in fields(Swaps)]
    swaps = Swaps(*(np.concatenate([getattr(first.swaps, name), getattr(late.swaps, name)]) for name in names))
    return Batch(step_id=first.step_id, admitted=first.admitted + late.admitted, swaps=swaps, **arrays)


def without(batch: Batch, leave: Longs) -> Batch:
    """The batch, not launched yet, without the rows at these positions. Their new blocks stay theirs."""
    keep = np.ones(len(batch.rows), np.bool_)
    keep[leave] = False
    names = ("rows", "slots", "starts", "num_tokens", "samples", "pad_tokens")
    return replace(batch, load=NOTHING, **{name: getattr(batch, name)[keep] for name in names})


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to launch. `until` is when to ask again even if nothing happens (inf: only an event helps)."""

    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one sampled token: its natural-log probability and rank (1 is best), and the best ids with theirs."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a batch yielded: counts int32[n], tokens per row (0 or 1) in its order; token_ids int32[counts.sum()].

    `logprobs` is aligned with token_ids where anyone asked (None for those who did not). `elapsed` is the wall time of
    the step in seconds, `device_time` the part in which the device computed, `copy_time` that in which the batch's
    swaps were copied. `failed` maps a row's position in the batch to what went wrong with it alone (its logits were not
    numbers, say); it has no token. `entropy` maps positions of rows whose first token this is to the entropy of its
    distribution, in nats, where the executor knows it.
    """

    step_id: int
    counts: Ints
    token_ids: Ints
    logprobs: list[Logprobs | None] | None = None
    elapsed: float = 0.0
    device_time: float = 0.0
    failed: dict[int, str] = field(default_factory=dict)
    entropy: dict[int, float] = field(default_factory=dict)
    copy_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a request, with where its time went: state name to seconds, summing to `finished - arrival`, and the
    timeline that they are the sums of."""

    handle: int
    id: str
    reason: FinishReason
    stop_token: int | None
    prompt_len: int
    output_len: int
    cached_len: int
    preemptions: int
    arrival: float
    first_token: float
    finished: float
    state_times: dict[str, float]
    message: str = ""
    timeline: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a commit (or an abort) has to tell. One entry per new token: handles int64[k], token_ids int32[k]."""

    step_id: int
    now: float
    handles: Longs
    token_ids: Ints
    logprobs: list[Logprobs | None] | None = None
    finished: list[Finished] = field(default_factory=list)
