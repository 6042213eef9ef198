"""Log probabilities of sampled tokens, under the model's own distribution.

As OpenAI's and vLLM's, they are the log softmax of the raw logits: before temperature, filters, biases and penalties.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from headway.core.batch import Logprobs
from headway.sampling.sums import totals

MAX_TOP = 20
"""As many of the best as a request may ask for. Always looked up, so that ties fall the same way in any batch."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """For n sampled tokens: natural log probability float32 [n], rank int64 [n], and the best: [n, MAX_TOP or V]."""

    logprob: Tensor
    rank: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def to_host(self) -> LogprobTensors:
        """The same on the CPU, once the device has done all that was given to it before."""
        return LogprobTensors(*(getattr(self, field.name).to("cpu", non_blocking=True) for field in fields(self)))

    def to_list(self, counts: list[int]) -> list[Logprobs]:
        """One entry per token, with counts[i] of the best."""
        columns = (self.logprob.tolist(), self.rank.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist(), counts)
        return [
            Logprobs(logprob, rank, ids[:count], values[:count])
            for logprob, rank, ids, values, count in zip(*columns, strict=True)
        ]


def logprobs_of(logits: Tensor, token_ids: Tensor) -> LogprobTensors:
    """Of raw float32 logits [n, V] and sampled token_ids int64 [n]. Rank 1 is the best; equals share their rank."""
    best, ids = logits.topk(min(MAX_TOP, logits.shape[1]), dim=-1)
    total = best[:, :1] + totals((logits - best[:, :1]).exp_()).log()[:, None].float()
    chosen = logits.gather(1, token_ids[:, None])
    rank = (logits > chosen).sum(dim=-1) + 1
    return LogprobTensors((chosen - total)[:, 0], rank, ids, best - total)
