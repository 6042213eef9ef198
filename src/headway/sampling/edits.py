"""What one request changes in its logits before a token is chosen: forbidden stops, biases, penalties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headway.core.request import SamplingParams


class LogitEdits:
    """The edits of one request, in vLLM's order: min_tokens, logit_bias, then the penalties.

    While fewer than `min_tokens` have been generated none of `stop_token_ids` can be chosen. `presence_penalty` and
    `frequency_penalty` count the tokens generated, as OpenAI's do; `repetition_penalty` (Keskar et al. 2019) counts the
    prompt too. Ids beyond the vocabulary name no token and are passed over.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_len: int,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab_size}
        self._params = params
        self._prompt_len = prompt_len
        self._stops = _ids((token for token in stop_token_ids if 0 <= token < vocab_size), device)
        self._biased = _ids(bias, device)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)
        self._counts_output = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Whether these parameters change any logit."""
        return bool(
            params.min_tokens
            or params.logit_bias
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )

    def apply(self, logits: Tensor, tokens: Tensor) -> None:
        """Changes float32 logits [V] in place, given the sequence so far, tokens int64 [prompt and generated]."""
        params = self._params
        generated = tokens[self._prompt_len :]
        if len(generated) < params.min_tokens:
            logits[self._stops] = -torch.inf
        if len(self._biased):
            logits[self._biased] += self._bias
        if params.repetition_penalty != 1.0:
            seen = tokens.unique()
            scores = logits[seen]
            logits[seen] = torch.where(
                scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
            )
        if self._counts_output and len(generated):
            seen, counts = generated.unique(return_counts=True)
            logits[seen] -= params.frequency_penalty * counts + params.presence_penalty


def _ids(tokens: Iterable[int], device: torch.device) -> Tensor:
    return torch.tensor(list(tokens), dtype=torch.int64, device=device)
