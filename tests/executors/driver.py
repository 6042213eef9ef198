"""Batches made by hand for an executor: slots, blocks in no order, and what each sequence has got so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.core.batch import NO_SWAPS, Admission, Batch, Logprobs, StepOutput, Swaps
from headway.core.request import SamplingParams
from headway.executors.base import Executor


@dataclass
class Seat:
    """One request as the test sees it. `length` counts the tokens that the executor knows, collected or not."""

    slot: int
    known: list[int]
    prompt_len: int
    params: SamplingParams
    stop: tuple[int, ...]
    choice: int
    length: int
    computed: int = 0
    admitted: bool = False
    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs | None] = field(default_factory=list)


class Driver:
    """Launches and collects in order. Steps are lists of (sequence, tokens)."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        capacity = executor.capacity()
        self.block_size = capacity.block_size
        self.free_blocks = np.random.default_rng(seed).permutation(capacity.num_blocks).tolist()
        self.free_slots = list(range(capacity.max_num_seqs))
        self._in_flight: list[tuple[object, Batch, list[Seat]]] = []
        self._step_id = 0
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []

    def add(
        self,
        prompt: Sequence[int],
        *,
        generated: Sequence[int] = (),
        stop: Sequence[int] = (),
        choice: int = 0,
        **params,
    ) -> Seat:
        """A request that will be admitted with its first step; `generated` is what it had before it was preempted."""
        known = [*map(int, prompt), *generated]
        asked = SamplingParams(max_tokens=None, **({"temperature": 0.0} | params))
        slot = self.free_slots.pop(0)
        return Seat(slot, known, len(prompt), asked, tuple(stop), choice, len(known), tokens=list(generated))

    def launch(self, *step: tuple[Seat, int], pads: int = 0) -> None:
        """Computes so many more tokens of each; who is then computed up to its end yields a token."""
        rows = [sequence for sequence, _ in step]
        counts = np.array([count for _, count in step], np.int32)
        starts = np.array([row.computed for row in rows], np.int32)
        admissions, entries = [], []
        for row, count in step:
            if not row.admitted:
                row.admitted = True
                ids = np.array(row.known, np.int32)
                admissions.append(Admission(row.slot, row.slot, ids, row.prompt_len, row.params, row.stop, row.choice))
            while len(row.blocks) * self.block_size < row.computed + count:
                entries.append((row.slot, len(row.blocks), self.free_blocks.pop(0)))
                row.blocks.append(entries[-1][2])
            row.computed += count
        samples = np.array([row.computed == row.length for row in rows], bool)
        for row, sampled in zip(rows, samples, strict=True):
            row.length += int(sampled)
        pad_tokens = np.zeros(len(rows), np.int32)
        pad_tokens[: min(1, len(rows))] = pads
        self._step_id += 1
        slots = np.array([row.slot for row in rows], np.int32)
        new = np.array(entries, np.int32).reshape(-1, 3).T
        swaps = Swaps(*np.array(self._out, np.int32).reshape(-1, 2).T, *np.array(self._in, np.int32).reshape(-1, 2).T)
        self._out, self._in = [], []
        batch = Batch(
            self._step_id,
            slots.astype(np.int64),
            slots,
            starts,
            counts,
            samples,
            pad_tokens,
            tuple(admissions),
            *new,
            swaps=swaps if len(swaps) else NO_SWAPS,
        )
        self._in_flight.append((self.executor.launch(batch), batch, rows))

    def collect(self) -> StepOutput:
        """Collects the oldest step and gives everybody what is his."""
        ticket, batch, rows = self._in_flight.pop(0)
        output = self.executor.collect(ticket)
        assert output.step_id == batch.step_id
        takers = [row for row, count in zip(rows, output.counts, strict=True) if count]
        for i, (row, token) in enumerate(zip(takers, output.token_ids.tolist(), strict=True)):
            row.tokens.append(token)
            row.logprobs.append(output.logprobs[i] if output.logprobs is not None else None)
        return output

    def step(self, *step: tuple[Seat, int], pads: int = 0) -> StepOutput:
        self.launch(*step, pads=pads)
        return self.collect()

    def swap_out(self, seat: Seat, host: Sequence[int]) -> list[int]:
        """The next step copies its blocks to these of the host; slot and blocks go to whoever comes next."""
        self._out += zip(seat.blocks, host, strict=True)
        return self.finish(seat)

    def swap_in(self, seat: Seat, host: Sequence[int], computed: int) -> None:
        """The next step, its first one, copies these blocks of the host to new ones: so many tokens of it are there."""
        seat.computed = computed
        self._in += zip(self.free_blocks[: len(host)], host, strict=True)

    def finish(self, seat: Seat) -> list[int]:
        """Its slot goes to whoever comes next, and so do its blocks, which are returned: the last one first."""
        self.free_slots.insert(0, seat.slot)
        freed, seat.blocks = seat.blocks, []
        self.free_blocks = freed[::-1] + self.free_blocks
        return freed
