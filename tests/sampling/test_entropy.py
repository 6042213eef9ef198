"""Entropy of the likeliest tokens, against closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from headway.sampling.entropy import LIKELIEST, entropy_of_likeliest


def test_of_few_equally_likely_tokens_it_is_the_logarithm_of_their_number():
    logits = torch.full((2, 1000), -math.inf)
    logits[0, :8] = 3.0
    logits[1, 5] = -2.0
    logits.masked_fill_(logits.isinf(), -1e9)
    assert entropy_of_likeliest(logits).tolist() == pytest.approx([math.log(8), 0.0], abs=1e-5)


def test_of_many_only_the_likeliest_count_with_their_own_probabilities():
    found = entropy_of_likeliest(torch.zeros(1, 1000)).item()
    assert found == pytest.approx(LIKELIEST / 1000 * math.log(1000), rel=1e-5)
    assert entropy_of_likeliest(torch.zeros(1, 4)).item() == pytest.approx(math.log(4), rel=1e-5)
    assert entropy_of_likeliest(torch.zeros(0, 1000)).shape == (0,)
