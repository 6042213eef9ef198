"""The sampler as a step uses it: mixed rows, penalties, logprobs, and rows that came to grief."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from headway.core.request import SamplingParams
from headway.sampling.sampler import Sampled, Sampler
from tests.sampling.reference import probabilities

VOCAB = 3000
LENGTH = 40


def mixed_params() -> list[SamplingParams]:
    """One of each kind, some twice."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 5},
        {},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_k": 40, "logprobs": 0},
        {"top_k": 1500},
        {"min_p": 0.05, "temperature": 1.3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3, "temperature": 0.0, "logprobs": 20},
        {"logit_bias": {3: 50.0, 9: -100.0}},
        {"min_tokens": 30, "top_p": 0.999, "temperature": 3.0},
    ]
    return [SamplingParams(seed=s, max_tokens=None, **kind) for s, kind in enumerate(kinds * 2)]


def random_logits(rows: int, seed: int = 0, spread: float = 3.0, vocab_size: int = VOCAB) -> torch.Tensor:
    """In steps of 1/8, as bfloat16 would give: full of ties."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * spread * 8).round() / 8


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def sequences() -> torch.Tensor:
    return torch.randint(0, VOCAB, (22, LENGTH), generator=torch.Generator().manual_seed(1))


def make_sampler(
    params: list[SamplingParams], *, prompt_len: int = 10, stop: tuple[int, ...] = (2,), vocab_size: int = VOCAB
) -> Sampler:
    sampler = Sampler(len(params), vocab_size)
    for slot, each in enumerate(params):
        sampler.admit(slot, each, choice=slot % 3, prompt_len=prompt_len, stop_token_ids=stop)
    return sampler


def sample_one(params: SamplingParams, logits: torch.Tensor, tokens: torch.Tensor, **admission) -> Sampled:
    """`params` on one row of logits [V] after `tokens`."""
    sampler = make_sampler([params], **admission)
    return sampler.sample(logits[None].clone(), np.array([0]), np.array([len(tokens)]), tokens[None])


@pytest.mark.usefixtures("threads")
def test_a_row_is_the_same_alone_and_in_any_company(sequences: torch.Tensor):
    """With a vocabulary so large that threads share even a single row."""
    params, vocab_size = mixed_params(), 70_001
    sampler = make_sampler(params, vocab_size=vocab_size)
    logits = random_logits(len(params), vocab_size=vocab_size)
    slots, positions = np.arange(len(params)), np.arange(len(params)) + 12
    together = sampler.sample(logits.clone(), slots, positions, sequences)
    logprobs = together.list_logprobs()
    assert together.valid.all()
    for row in slots:
        alone = sampler.sample(logits[row : row + 1].clone(), slots[row : row + 1], positions[row : row + 1], sequences)
        assert alone.token_ids.item() == together.token_ids[row].item()
        assert (alone.list_logprobs() or [None])[0] == logprobs[row]
    order = np.random.default_rng(2).permutation(slots)[:15]
    shuffled = sampler.sample(logits[order].clone(), slots[order], positions[order], sequences)
    assert shuffled.token_ids.tolist() == together.token_ids[order].tolist()
    assert shuffled.list_logprobs() == [logprobs[row] for row in order]


def test_seed_choice_and_position_are_all_that_moves_a_draw():
    params = [SamplingParams(seed=1), SamplingParams(seed=1), SamplingParams(seed=2)]
    sampler = Sampler(3, VOCAB)
    for slot, choice in enumerate((0, 1, 0)):
        sampler.admit(slot, params[slot], choice=choice, prompt_len=0)
    logits = torch.zeros(1, VOCAB)
    tokens = torch.zeros(3, 10, dtype=torch.int64)

    def at(slot: int, position: int) -> int:
        return sampler.sample(logits.clone(), np.array([slot]), np.array([position]), tokens).token_ids.item()

    draws = [at(0, 5), at(1, 5), at(2, 5), at(0, 6)]
    assert len(set(draws)) == 4
    assert draws == [at(0, 5), at(1, 5), at(2, 5), at(0, 6)]


def test_greedy_takes_the_best_and_of_equals_the_first():
    logits = torch.zeros(VOCAB)
    logits[[40, 700, 2000]] = 5.0
    drawn = sample_one(SamplingParams(temperature=0.0), logits, torch.zeros(0, dtype=torch.int64))
    assert drawn.token_ids.tolist() == [40]


def test_rows_that_are_not_numbers_are_told_and_disturb_nobody(sequences: torch.Tensor):
    params = mixed_params()
    sampler, logits = make_sampler(params), random_logits(len(params))
    slots, positions = np.arange(len(params)), np.full(len(params), 12)
    clean = sampler.sample(logits.clone(), slots, positions, sequences)
    broken = logits.clone()
    broken[2, 17] = math.nan
    broken[3] = math.nan
    broken[4, 5] = math.inf
    broken[8, :] = -math.inf
    sampled = sampler.sample(broken, slots, positions, sequences)
    good = np.setdiff1d(slots, [2, 3, 4, 8])
    assert sampled.valid.tolist() == [row in good for row in slots]
    assert sampled.token_ids[good].tolist() == clean.token_ids[good].tolist()
    assert (sampled.token_ids[[2, 3, 4, 8]] == 0).all()


def test_a_random_row_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="no seed"):
        Sampler(1, VOCAB).admit(0, SamplingParams(), prompt_len=1)


def test_a_slot_forgets_its_last_request():
    sampler = make_sampler([SamplingParams(seed=1, logit_bias={7: 100.0}, logprobs=3, top_k=1)])
    sampler.admit(0, SamplingParams(temperature=0.0), prompt_len=0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    sampled = sampler.sample(logits, np.array([0]), np.array([0]), torch.zeros(1, 1, dtype=torch.int64))
    assert sampled.token_ids.tolist() == [9]
    assert sampled.list_logprobs() is None


def test_penalties_follow_their_formulas():
    """Read off through the tokens drawn: greedy, and as probabilities."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
    prompt, generated = [5, 6, 7, 7], [7, 8, 8, 8, 9]
    params = SamplingParams(
        temperature=0.0,
        presence_penalty=0.7,
        frequency_penalty=0.3,
        repetition_penalty=1.4,
        logit_bias={6: 4.0, 11: -2.5},
    )
    expected = logits.double().numpy().copy()
    expected[6] += 4.0
    expected[11] -= 2.5
    for token in {*prompt, *generated}:
        expected[token] = expected[token] / 1.4 if expected[token] > 0 else expected[token] * 1.4
    for token in set(generated):
        expected[token] -= 0.7 + 0.3 * generated.count(token)
    sampler = make_sampler([params], prompt_len=len(prompt))
    edited = logits[None].clone()
    sequence = torch.tensor([prompt + generated])
    sampled = sampler.sample(edited, np.array([0]), np.array([sequence.shape[1]]), sequence)
    assert np.abs(edited[0].double().numpy() - expected).max() < 1e-5
    assert sampled.token_ids.item() == expected.argmax()


def test_penalties_look_only_at_the_sequence_so_far():
    """What lies in the slot beyond the position belongs to a request before."""
    tokens = torch.tensor([[1, 2, 3, 4, 4, 4]])
    sampler = make_sampler([SamplingParams(temperature=0.0, presence_penalty=2.0)], prompt_len=1)
    logits = torch.zeros(1, VOCAB)
    sampler.sample(logits, np.array([0]), np.array([3]), tokens)
    assert torch.nonzero(logits[0])[:, 0].tolist() == [2, 3]


def test_no_stop_before_min_tokens():
    logits = torch.zeros(VOCAB)
    logits[2], logits[4] = 9.0, 8.0
    params = SamplingParams(temperature=0.0, min_tokens=3)
    for generated, expected in ((0, 4), (2, 4), (3, 2), (4, 2)):
        tokens = torch.zeros(5 + generated, dtype=torch.int64)
        assert sample_one(params, logits, tokens, prompt_len=5, stop=(2, 10**6)).token_ids.item() == expected


def test_a_row_whose_every_token_is_forbidden_is_told():
    params = SamplingParams(temperature=0.0, min_tokens=1)
    sampled = sample_one(params, torch.zeros(VOCAB), torch.zeros(1, dtype=torch.int64), stop=tuple(range(VOCAB)))
    assert not sampled.valid.item()


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    logits = random_logits(1, seed=4)[0] + torch.linspace(0, 1e-3, VOCAB)
    params = SamplingParams(seed=3, temperature=1.7, top_k=5, logprobs=4, logit_bias={77: 100.0}, max_tokens=None)
    sampled = sample_one(params, logits, torch.zeros(12, dtype=torch.int64))
    entry = sampled.list_logprobs()[0]
    expected = torch.log_softmax(logits.double(), -1)
    best = expected.argsort(descending=True)
    assert sampled.token_ids.item() == 77
    assert entry.logprob == pytest.approx(expected[77].item(), abs=1e-5)
    assert entry.rank == 1 + (expected > expected[77]).sum().item()
    assert entry.top_ids == best[:4].tolist()
    assert entry.top_logprobs == pytest.approx(expected[best[:4]].tolist(), abs=1e-5)


def test_logprobs_of_zero_give_the_sampled_token_only():
    sampled = sample_one(
        SamplingParams(temperature=0.0, logprobs=0), random_logits(1)[0], torch.zeros(1, dtype=torch.int64)
    )
    entry = sampled.list_logprobs()[0]
    assert (entry.rank, entry.top_ids, entry.top_logprobs) == (1, [], [])


def test_tokens_over_positions_follow_the_filtered_distribution():
    """The whole way from (seed, choice, position) to tokens: 6,000 positions of one request."""
    params = SamplingParams(seed=11, temperature=0.9, top_p=0.8, top_k=30)
    sampler = make_sampler([params])
    logits = random_logits(1, seed=5, spread=1.0)
    count = 6000
    rows = logits.expand(count, -1).clone()
    tokens = torch.zeros(1, count, dtype=torch.int64)
    drawn = sampler.sample(rows, np.zeros(count, np.int64), np.arange(count), tokens).token_ids.numpy()
    expected = probabilities(logits[0].numpy(), temperature=0.9, top_p=0.8, top_k=30) * count
    observed = np.bincount(drawn, minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    kept = expected > 0
    assert ((observed - expected)[kept] ** 2 / expected[kept]).sum() < 2 * kept.sum() + 30
