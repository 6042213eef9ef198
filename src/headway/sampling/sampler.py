"""Batched sampling: what each slot's request asked for, and the choice of one token per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headway.core.batch import Logprobs
from headway.core.request import SamplingParams
from headway.sampling.draw import Shape, draw
from headway.sampling.edits import LogitEdits
from headway.sampling.logprobs import LogprobTensors, logprobs_of
from headway.sampling.rng import uniforms

Longs = npt.NDArray[np.int64]
NO_LOGPROBS = -1

BestOf = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Logits float32 [n, V] -> the largest of each row float32 [n], NaN where there is one; its first place int64 [n]."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens chosen for n rows: token_ids int64 [n].

    `valid` bool [n] is False where the row's logits left nothing to choose from (NaN, infinity, or all forbidden): its
    token is 0 and means nothing. `logprobs` belong to `logprob_rows`, of which each wants `logprob_counts` best.
    """

    token_ids: Tensor
    valid: Tensor
    logprob_rows: list[int]
    logprob_counts: list[int]
    logprobs: LogprobTensors | None

    def to_host(self) -> Sampled:
        """The same on the CPU, once the device has done all that was given to it before."""
        return Sampled(
            self.token_ids.to("cpu", non_blocking=True),
            self.valid.to("cpu", non_blocking=True),
            self.logprob_rows,
            self.logprob_counts,
            None if self.logprobs is None else self.logprobs.to_host(),
        )

    def list_logprobs(self) -> list[Logprobs | None] | None:
        """One entry per row, None for those that asked for none; None when nobody did."""
        if self.logprobs is None:
            return None
        entries: list[Logprobs | None] = [None] * len(self.token_ids)
        for row, entry in zip(self.logprob_rows, self.logprobs.to_list(self.logprob_counts), strict=True):
            entries[row] = entry
        return entries


class Sampler:
    """Chooses tokens for slots. No row's outcome hangs on another's: alone or in a batch it is the same."""

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu", best_of: BestOf | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._best_of = best_of
        self.device = torch.device(device)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.uint64)
        self._choice = np.zeros(num_slots, np.int64)
        self._logprobs = np.full(num_slots, NO_LOGPROBS, np.int64)
        self._edits: list[LogitEdits | None] = [None] * num_slots

    def admit(
        self, slot: int, params: SamplingParams, *, choice: int = 0, prompt_len: int, stop_token_ids: Sequence[int] = ()
    ) -> None:
        """From now on `slot` is sampled as `params` say.

        Raises:
            ValueError: they draw at random but have no seed: drawing one is the engine's, which records it.
        """
        if params.seed is None and not params.greedy:
            raise ValueError("a request that samples at random has no seed: the engine must draw one before admission")
        unlimited = params.top_k <= 0 or params.top_k > self._vocab_size
        self._temperature[slot] = params.temperature
        self._top_k[slot] = self._vocab_size if unlimited else params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = (params.seed or 0) % 2**64
        self._choice[slot] = choice
        self._logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._edits[slot] = None
        if LogitEdits.needed(params):
            self._edits[slot] = LogitEdits(params, prompt_len, stop_token_ids, self._vocab_size, self.device)

    def sample(self, logits: Tensor, slots: Longs, positions: Longs, tokens: Tensor) -> Sampled:
        """One token for each row of logits float32 [n, V], which is changed in place.

        slots int64 [n]; positions int64 [n], where in its sequence the new token goes; tokens int64 [slots, length]
        holds the sequences up to there.
        """
        asked = np.flatnonzero(self._logprobs[slots] != NO_LOGPROBS)
        raw = logits[self._tensor(asked)] if len(asked) else None
        for row, slot in enumerate(slots):
            edits = self._edits[slot]
            if edits is not None:
                edits.apply(logits[row], tokens[slot, : positions[row]])
        best, best_ids = (logits.amax(dim=-1), None) if self._best_of is None else self._best_of(logits)
        valid = best.isfinite()
        token_ids = torch.empty(len(slots), dtype=torch.int64, device=self.device)
        at_random = self._temperature[slots] > 0
        if not at_random.all():
            index = self._tensor(np.flatnonzero(~at_random))
            token_ids[index] = _rows(logits, index).argmax(dim=-1) if best_ids is None else best_ids[index]
        if at_random.any():
            rows = np.flatnonzero(at_random)
            index = self._tensor(rows)
            token_ids[index] = self._draw(_rows(logits, index), best[index], slots[rows], positions[rows])
        token_ids.masked_fill_(~valid, 0)
        return Sampled(
            token_ids,
            valid,
            logprob_rows=asked.tolist(),
            logprob_counts=self._logprobs[slots[asked]].tolist(),
            logprobs=None if raw is None else logprobs_of(raw, token_ids[self._tensor(asked)]),
        )

    def _draw(self, logits: Tensor, best: Tensor, slots: Longs, positions: Longs) -> Tensor:
        shape = Shape(*(self._tensor(c[slots]) for c in (self._temperature, self._top_k, self._top_p, self._min_p)))
        return draw(logits, best, shape, self._tensor(uniforms(self._seed[slots], self._choice[slots], positions)))

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _rows(logits: Tensor, index: Tensor) -> Tensor:
    return logits if len(index) == len(logits) else logits[index]
