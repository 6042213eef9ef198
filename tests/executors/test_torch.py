"""The torch executor, driven by hand, against decoding one request at a time with nothing paged or batched."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headway import models
from headway.core.batch import Batch
from headway.core.errors import ModelError
from headway.executors import make_executor
from headway.executors.config import ExecutorConfig
from headway.executors.torch import TorchExecutor
from headway.kernels import native
from headway.models.llama import DecoderModel
from headway.sampling.rng import uniforms
from tests import naive
from tests.executors.driver import Driver, Seat
from tests.sampling.reference import probabilities

SETTINGS = {"cpu": {"kernels": "torch"}, "native": {"kernels": "native"}, "cuda": {"device": "cuda"}}
NATIVE = pytest.mark.skipif(native.module() is None, reason="the native kernels were not built")
BODIES = ["cpu", pytest.param("native", marks=NATIVE), *(["cuda"] if torch.cuda.is_available() else [])]
POOL = 2 * 2 * 2 * 16 * 4 * 16 * 100
"""Bytes of 100 blocks of 16 tokens of the tiny model: keys and values, 2 layers of 2 heads of 16 float32."""


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> DecoderModel:
    return models.load(tiny_model_dir, torch.float32)


@pytest.fixture(scope="module", params=BODIES)
def shared_executor(tiny_model_dir: Path, request: pytest.FixtureRequest) -> Iterator[TorchExecutor]:
    executor = TorchExecutor(config(tiny_model_dir, **SETTINGS[request.param]))
    yield executor
    executor.close()


@pytest.fixture
def driver(shared_executor: TorchExecutor) -> Driver:
    return Driver(shared_executor)


def config(folder: Path, **changes) -> ExecutorConfig:
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": POOL, "max_num_seqs": 8}
    settings |= {"threads": 1, "block_size": 16, "swap_space": 8 * POOL // 100}
    return ExecutorConfig(str(folder), **(settings | changes))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(100, 40_000, length).tolist()


def expect_greedy(model: DecoderModel, seats: list[Seat]) -> None:
    """Each token is the best after all before it, computed anew from the whole sequence."""
    for seat in seats:
        assert seat.tokens
        sequence = seat.known + seat.tokens
        best = naive.logits(model, sequence[:-1])[len(seat.known) - 1 :].topk(2)
        assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-4, "two tokens are rivals here: take another seed"
        assert seat.tokens == best.indices[:, 0].tolist()


def test_one_request_alone(driver: Driver, model: DecoderModel):
    seat = driver.add(prompt(21))
    driver.step((seat, 21))
    for _ in range(15):
        driver.step((seat, 1))
    expect_greedy(model, [seat])


def test_a_prompt_in_chunks_yields_no_token_before_its_end(driver: Driver, model: DecoderModel):
    seat = driver.add(prompt(50))
    for count in (20, 1, 16, 3):
        output = driver.step((seat, count))
        assert output.counts.tolist() == [0]
        assert not len(output.token_ids)
    driver.step((seat, 10))
    driver.step((seat, 1))
    assert len(seat.tokens) == 2
    expect_greedy(model, [seat])


def test_prefills_and_decodes_in_one_step(driver: Driver, model: DecoderModel):
    a, b, c, d = (driver.add(prompt(n, seed=n)) for n in (5, 33, 70, 1))
    driver.step((a, 5), (b, 20))
    driver.step((c, 30), (a, 1), (d, 1), (b, 13))
    driver.step((d, 1), (b, 1), (c, 40), (a, 1))
    driver.step((c, 1), (a, 1), (b, 1), (d, 1))
    assert [len(seat.tokens) for seat in (a, b, c, d)] == [4, 3, 2, 3]
    expect_greedy(model, [a, b, c, d])


def test_steps_launched_ahead_read_tokens_the_host_has_not_seen(driver: Driver, model: DecoderModel):
    a, b = driver.add(prompt(12)), driver.add(prompt(40, seed=1))
    driver.launch((a, 12), (b, 30))
    driver.launch((a, 1), (b, 10))
    for _ in range(10):
        driver.launch((a, 1), (b, 1))
        driver.collect()
    driver.collect()
    driver.collect()
    assert len(a.tokens) == 12
    expect_greedy(model, [a, b])


def test_slots_and_blocks_go_to_others(driver: Driver, model: DecoderModel):
    first, other = driver.add(prompt(60)), driver.add(prompt(9, seed=1))
    driver.step((first, 60), (other, 9))
    driver.step((first, 1), (other, 1))
    freed = driver.finish(first)
    second = driver.add(prompt(35, seed=2))
    driver.step((other, 1), (second, 35))
    assert second.slot == first.slot
    assert second.blocks == freed[::-1][:3]
    driver.step((second, 1), (other, 1))
    expect_greedy(model, [first, second, other])


def test_who_is_swapped_out_and_in_goes_on_as_if_nothing_had_happened(driver: Driver, model: DecoderModel):
    """Its blocks go to another in the very step that copies them out, and what is copied in is used in that step; both
    are launched before the step that wrote them has been collected."""
    first, other = driver.add(prompt(40)), driver.add(prompt(9, seed=1))
    driver.step((first, 40), (other, 9))
    driver.step((first, 1), (other, 1))
    driver.launch((first, 1), (other, 1))
    freed = driver.swap_out(first, [5, 0, 3])
    second = driver.add(prompt(35, seed=2))
    driver.launch((other, 1), (second, 35))
    assert set(second.blocks) == set(freed)
    driver.collect()
    output = driver.collect()
    assert output.copy_time > 0
    again = driver.add(first.known, generated=first.tokens)
    driver.swap_in(again, [5, 0, 3], computed=len(first.known) + 2)
    driver.launch((again, 1), (second, 1))
    driver.launch((again, 1), (second, 1), (other, 1))
    assert driver.collect().copy_time > 0
    assert driver.collect().copy_time == 0
    first.tokens = again.tokens
    assert len(first.tokens) == 5
    expect_greedy(model, [first, second, other])


@pytest.mark.parametrize("seed", range(3))
def test_any_schedule(driver: Driver, model: DecoderModel, seed: int):
    """Random chunks and company, up to two steps ahead, slots and blocks handed on."""
    rng = np.random.default_rng(seed)
    waiting = [prompt(int(rng.integers(1, 60)), seed=100 * seed + i) for i in range(12)]
    board, ended, ahead = [], [], 0
    while waiting or board:
        while waiting and len(board) < 4:
            board.append(driver.add(waiting.pop()))
        rows = [seat for seat in board if rng.random() < 0.8] or board[:1]
        driver.launch(*((seat, int(rng.integers(1, seat.length - seat.computed + 1))) for seat in rows))
        ahead += 1
        if ahead == 2 or rng.random() < 0.5:
            driver.collect()
            ahead -= 1
        for seat in [seat for seat in board if seat.length - seat.prompt_len >= 6]:
            while ahead:
                driver.collect()
                ahead -= 1
            board.remove(seat)
            driver.finish(seat)
            ended.append(seat)
    assert len(ended) == 12
    expect_greedy(model, ended)


def test_sampled_tokens_are_the_inverse_of_the_naive_distribution(driver: Driver, model: DecoderModel):
    """By seed, choice and position, with neighbours that sample otherwise."""
    greedy = driver.add(prompt(10, seed=3))
    shape = {"temperature": 1.5, "top_k": 20, "top_p": 0.95}
    seats = [driver.add(prompt(25), seed=s, choice=c, **shape) for s, c in ((7, 0), (7, 1), (2**64 - 1, 0))]
    driver.step((greedy, 10), *((seat, 25) for seat in seats))
    for _ in range(12):
        driver.step((seats[2], 1), (greedy, 1), (seats[0], 1), (seats[1], 1))
    assert len({tuple(seat.tokens) for seat in seats}) == 3
    for seat in seats:
        positions = 25 + np.arange(len(seat.tokens))
        drawn = uniforms(np.uint64(seat.params.seed), seat.choice, positions)
        logits = naive.logits(model, seat.known + seat.tokens)[24:-1].numpy()
        for row, u, token in zip(logits, drawn, seat.tokens, strict=True):
            ends = np.cumsum(probabilities(row, **shape))
            assert ends[token] > u - 1e-4
            assert (ends[token - 1] if token else 0.0) < u + 1e-4


def test_a_resumed_request_goes_on_as_if_nothing_had_been(driver: Driver):
    """Its tokens come back with it, and its penalties and random numbers go on where they were."""
    asked = {"seed": 5, "temperature": 1.2, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 1}
    whole = driver.add(prompt(20), **asked)
    driver.step((whole, 20))
    for _ in range(9):
        driver.step((whole, 1))
    resumed = driver.add(prompt(20), generated=whole.tokens[:4], **asked)
    driver.step((resumed, 24))
    for _ in range(5):
        driver.step((resumed, 1))
    assert resumed.tokens == whole.tokens
    assert [entry.logprob for entry in resumed.logprobs] == pytest.approx(
        [entry.logprob for entry in whole.logprobs[4:]], abs=1e-4
    )


def test_logprobs_go_to_those_who_asked(driver: Driver, model: DecoderModel):
    a, b = driver.add(prompt(9), logprobs=3), driver.add(prompt(8, seed=1))
    output = driver.step((b, 8), (a, 9))
    assert output.logprobs[0] is None
    expected = torch.log_softmax(naive.logits(model, a.known)[-1].double(), -1)
    assert a.logprobs[0].logprob == pytest.approx(expected.max().item(), abs=1e-4)
    assert a.logprobs[0].rank == 1
    assert a.logprobs[0].top_ids == expected.topk(3).indices.tolist()
    assert driver.step((b, 1)).logprobs is None


def test_the_entropy_of_first_tokens_is_told(driver: Driver):
    decodes, comes = driver.add(prompt(5), logprobs=20), driver.add(prompt(9, seed=1), logprobs=20)
    driver.step((decodes, 5))
    output = driver.step((decodes, 1), (comes, 9))
    likeliest = np.array(comes.logprobs[0].top_logprobs)
    assert output.entropy == {1: pytest.approx(-(np.exp(likeliest) * likeliest).sum(), rel=1e-4)}
    assert driver.step((comes, 1)).entropy == {}


def test_no_stop_token_before_min_tokens(driver: Driver, model: DecoderModel):
    stop = int(naive.logits(model, prompt(11))[-1].argmax())
    seat = driver.add(prompt(11), stop=[stop], min_tokens=2)
    driver.step((seat, 11))
    driver.step((seat, 1))
    assert stop not in seat.tokens


def test_padding_is_computed_and_changes_nothing(driver: Driver, model: DecoderModel):
    a, b = driver.add(prompt(30)), driver.add(prompt(3, seed=1))
    driver.step((a, 30), (b, 3), pads=40)
    driver.step((b, 1), (a, 1), pads=7)
    driver.step((a, 1), (b, 1), pads=1)
    expect_greedy(model, [a, b])
    seen = []
    forward = driver.executor._forward
    prepare = forward.prepare
    forward.prepare = lambda step: seen.append(len(step.positions)) or prepare(step)
    driver.step((a, 1), pads=9)
    forward.prepare = prepare
    assert seen == [10]


def test_a_batch_of_padding_only(driver: Driver):
    empty = np.zeros(1, np.int32)
    batch = Batch(9, np.zeros(1, np.int64), empty, empty, empty, empty > 0, empty + 5, (), *[empty[:0]] * 3)
    output = driver.executor.collect(driver.executor.launch(batch))
    assert output.counts.tolist() == [0]


def test_a_failed_step_is_told_and_the_next_ones_run(driver: Driver, model: DecoderModel):
    good, bad = driver.add(prompt(10)), driver.add(prompt(4), temperature=1.0, seed=None)
    driver.step((good, 10))
    driver.launch((bad, 4))
    driver.launch((good, 1))
    with pytest.raises(ValueError, match="no seed"):
        driver.collect()
    driver.collect()
    driver.step((good, 1))
    assert len(good.tokens) == 3
    expect_greedy(model, [good])


@pytest.mark.parametrize("body", BODIES)
def test_a_row_that_is_not_a_number_fails_alone(tiny_model_dir: Path, tmp_path: Path, model: DecoderModel, body: str):
    poison = 77
    tensors = load_file(tiny_model_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][poison] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shape = json.loads((tiny_model_dir / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    executor = TorchExecutor(config(tmp_path, **SETTINGS[body]))
    driver = Driver(executor)
    good, bad = driver.add(prompt(20)), driver.add([5, poison, 6])
    output = driver.step((bad, 3), (good, 20))
    assert output.counts.tolist() == [0, 1]
    assert list(output.failed) == [0]
    assert "NaN" in output.failed[0]
    driver.step((good, 1), (bad, 1))
    freed = driver.finish(bad)  # they hold NaN: whoever gets them must not see it
    heir = driver.add(prompt(30, seed=4))
    driver.step((heir, 30), (good, 1))
    driver.step((heir, 1), (good, 1))
    executor.close()
    assert set(freed) <= set(heir.blocks)
    expect_greedy(model, [good, heir])


def test_times_are_told(driver: Driver):
    seat = driver.add(prompt(64))
    output = driver.step((seat, 64))
    assert 0 < output.device_time <= output.elapsed < 60


def test_bfloat16_is_the_default_and_near_float32(tiny_model_dir: Path, model: DecoderModel):
    lines = []
    executor = make_executor("torch", config(tiny_model_dir, dtype="auto"), lines.append)
    driver = Driver(executor)
    seats = [driver.add(prompt(n, seed=n), logprobs=0) for n in (40, 3, 17)]
    driver.step(*((seat, len(seat.known)) for seat in seats))
    driver.step(*((seat, 1) for seat in seats))
    executor.close()
    assert "bfloat16" in lines[0]
    for seat in seats:
        logits = naive.logits(model, seat.known + seat.tokens[:1])[-2:]
        expected = torch.log_softmax(logits, -1)[range(2), seat.tokens]
        assert [entry.logprob for entry in seat.logprobs] == pytest.approx(expected.tolist(), abs=0.5)


def test_what_the_start_reports(tiny_model_dir: Path):
    lines = []
    executor = TorchExecutor(config(tiny_model_dir), lines.append)
    executor.close()
    capacity = executor.capacity()
    assert (capacity.num_blocks, capacity.block_size, capacity.max_num_seqs) == (99, 16, 8)
    assert capacity.max_model_len == 99 * 16  # less than the model's 2,048: the pool's size
    assert "float32" in lines[0]
    assert "1 threads" in lines[0]
    assert "99 blocks of 16 tokens, 1,584 tokens at 512 bytes" in lines[1]
    assert "host memory for 8 swapped blocks" in lines[1]
    assert capacity.num_host_blocks == 8
    assert "the model could do 2,048" in lines[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 1585}, r"max_model_len 1,585 .* holds 1,584 tokens.*kv-cache-memory to 827,392"),
        ({"max_model_len": 2049}, "more than the 2,048 tokens the model was made for"),
        ({"kv_cache_memory": 10_000}, "0.010 MB for the KV pool is too little"),
        ({"kv_cache_memory": 0}, "0.000 MB for the KV pool is too little"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"device": "nonsense"}, "no device 'nonsense'"),
        ({"device": "meta"}, "'meta' is not supported"),
        ({"device": "cuda:99"}, "not there"),
        ({"model": "/nowhere"}, "/nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(tiny_model_dir: Path, changes: dict, message: str):
    with pytest.raises(ModelError, match=message) as caught:
        TorchExecutor(
            config(**({"folder": tiny_model_dir} | {"folder" if k == "model" else k: v for k, v in changes.items()}))
        )
    assert "\n" not in str(caught.value)


def test_the_named_memory_is_enough(tiny_model_dir: Path):
    executor = TorchExecutor(config(tiny_model_dir, max_model_len=1585, kv_cache_memory=827_392))
    executor.close()
    assert executor.capacity().max_model_len == 1585


def test_the_last_token_that_a_slot_can_hold(tiny_model_dir: Path, model: DecoderModel):
    """A sequence fills its block table and its slot to the brim."""
    executor = TorchExecutor(config(tiny_model_dir, max_model_len=48))
    driver = Driver(executor)
    seat = driver.add(prompt(46))
    driver.step((seat, 46))
    driver.step((seat, 1))
    driver.step((seat, 1))
    executor.close()
    assert seat.length == 49
    expect_greedy(model, [seat])


def test_closing_leaves_no_thread(tiny_model_dir: Path):
    executor = TorchExecutor(config(tiny_model_dir))
    driver = Driver(executor)
    seat = driver.add(prompt(5))
    driver.launch((seat, 5))
    driver.collect()
    executor.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        driver.launch((seat, 1))


def test_an_unknown_executor_is_refused(tiny_model_dir: Path):
    with pytest.raises(ValueError, match="unknown executor 'abacus'"):
        make_executor("abacus", config(tiny_model_dir), print)


AVX2 = torch.backends.cpu.get_cpu_capability() == "AVX2"


@pytest.mark.parametrize(
    ("body", "dtype"),
    [
        pytest.param("cpu", "float32", marks=pytest.mark.skipif(not AVX2, reason="known of this arithmetic only")),
        *(pytest.param("native", dtype, marks=NATIVE) for dtype in ("float32", "bfloat16")),
    ],
)
def test_company_and_chunks_change_no_bit(tiny_model_dir: Path, body: str, dtype: str):
    """The log probabilities of a request alone and whole, and of the same among others and in chunks."""
    executor = TorchExecutor(config(tiny_model_dir, dtype=dtype, **SETTINGS[body]))
    driver = Driver(executor)
    alone = driver.add(prompt(90), logprobs=0)
    driver.step((alone, 90))
    for _ in range(8):
        driver.step((alone, 1))
    driver.finish(alone)
    others = [driver.add(prompt(n, seed=n), logprobs=0) for n in (30, 140, 5)]
    crowded = driver.add(prompt(90), logprobs=0)
    driver.step((others[0], 30), (crowded, 41), (others[1], 8))
    driver.step((others[1], 2), (crowded, 3), (others[2], 5))
    driver.step((others[1], 100), (crowded, 46), (others[2], 1), (others[0], 1))
    for _ in range(8):
        driver.step((others[2], 1), (crowded, 1), (others[0], 1))
    executor.close()
    assert crowded.tokens == alone.tokens
    assert [entry.logprob for entry in crowded.logprobs] == [entry.logprob for entry in alone.logprobs]


def test_every_block_order_is_as_good(tiny_model_dir: Path):
    """The same request on differently shuffled blocks."""
    executor = TorchExecutor(config(tiny_model_dir))
    found = []
    for seed in range(3):
        driver = Driver(executor, seed=seed)
        seat = driver.add(prompt(70), logprobs=0)
        driver.step((seat, 70))
        for _ in range(5):
            driver.step((seat, 1))
        found.append((seat.tokens, [entry.logprob for entry in seat.logprobs]))
    executor.close()
    assert all(a == b for a, b in itertools.pairwise(found))
