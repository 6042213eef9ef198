"""What the torch executor remembers of each slot: its sequence, its block table, how it is sampled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headway.core.batch import Batch
from headway.sampling.sampler import Sampler

Longs = npt.NDArray[np.int64]


class Slots:
    """`tokens` int64 [slots, max_model_len + 1] on the device: a sampled token is the next step's input right there.

    `tables` int64 [slots, blocks]: only the entries of the running request's blocks mean anything.
    """

    def __init__(self, num_slots: int, max_model_len: int, block_size: int, null_block: int, sampler: Sampler) -> None:
        self.tokens = torch.zeros(num_slots, max_model_len + 1, dtype=torch.int64, device=sampler.device)
        self.tables = np.full((num_slots, -(-max_model_len // block_size)), null_block, np.int64)
        self._sampler = sampler

    def update(self, batch: Batch) -> None:
        """Takes in the batch's admissions and the new entries of its block tables."""
        for new in batch.admitted:
            self.tokens[new.slot, : len(new.token_ids)] = torch.from_numpy(new.token_ids.astype(np.int64))
            self._sampler.admit(
                new.slot,
                new.params,
                choice=new.choice,
                prompt_len=new.prompt_len,
                stop_token_ids=new.stop_token_ids,
            )
        self.tables[batch.block_slots, batch.block_index] = batch.block_ids
