"""`LLM` and `Engine` as a Python program uses them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.request import RequestError
from headway.engine.api import GenerationError
from tests.engine.echo import FAIL, MAX_MODEL_LEN, echo

FACTORY = "tests.engine.echo:build_loop"


@pytest.fixture
def llm(tiny_model_dir: Path) -> Iterator[LLM]:
    with LLM(tiny_model_dir, loop_factory=FACTORY, max_batch_size=4) as llm:
        yield llm


def nothing_left(llm: LLM) -> bool:
    stats = llm._loop.stats()
    return llm._loop.idle and stats.kv_usage == 0 and llm._router.num_live == 0


def greedy(max_tokens: int = 8, **params: object) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **params)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[*range(500 + 10 * i, 500 + 10 * i + i + 1)] for i in range(30)]
    lengths = [(7 * i) % 20 + 1 for i in range(30)]
    completions = llm.generate(prompts, [greedy(n) for n in lengths], use_tqdm=False)
    assert [c.prompt_token_ids for c in completions] == prompts
    for completion, prompt, length in zip(completions, prompts, lengths, strict=True):
        (output,) = completion.outputs
        assert output.token_ids == echo(prompt, length)
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.finish_reason == "length"
    assert nothing_left(llm)


def test_prompts_of_every_form(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Once upon a time")
    for prompts, count in [("Once upon a time", 1), (["Once upon a time"] * 2, 2), (ids, 1), ([ids, ids], 2)]:
        completions = llm.generate(prompts, greedy(), use_tqdm=False)
        assert [c.outputs[0].token_ids for c in completions] == [echo(ids, 8)] * count
    assert llm.generate("Once upon a time", use_tqdm=False)[0].prompt == "Once upon a time"
    assert llm.generate(ids, use_tqdm=False)[0].prompt is None
    assert llm.generate([], use_tqdm=False) == []


def test_choices_stops_and_logprobs(llm: LLM) -> None:
    prompt = llm.tokenizer.encode("one two three four")
    (completion,) = llm.generate([prompt], greedy(100, n=2, stop=["ee fo"], logprobs=1), use_tqdm=False)
    assert [o.index for o in completion.outputs] == [0, 1]
    for output in completion.outputs:
        assert (output.text, output.finish_reason, output.stop_reason) == ("one two thr", "stop", "ee fo")
        assert output.logprobs is not None
        assert [of.top_ids for of in output.logprobs] == [[t] for t in output.token_ids]
    assert nothing_left(llm)


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello"}]
    bye = [*hello, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    one = llm.chat(hello, greedy(), use_tqdm=False)
    several = llm.chat([hello, bye], greedy(), use_tqdm=False)
    expected = [llm.tokenizer.apply_chat_template(messages) for messages in (hello, bye)]
    assert [c.prompt for c in one] == expected[:1]
    assert [c.prompt for c in several] == expected
    assert several[1].prompt_token_ids == llm.tokenizer.encode(expected[1], add_special_tokens=False)


def test_one_bad_request_means_none_is_computed(llm: LLM) -> None:
    for bad in ([], [10**9], [1] * MAX_MODEL_LEN):
        with pytest.raises(RequestError):
            llm.generate([[500, 501], bad], greedy(), use_tqdm=False)
    with pytest.raises(ValueError, match="2 prompts need as many params"):
        llm.generate([[500], [501]], [greedy()] * 3, use_tqdm=False)
    assert llm._loop.stats().num_steps == 0


def test_the_loops_refusal_leaves_nothing(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_BLOCKS", "4")
    with LLM(str(tiny_model_dir), loop_factory=FACTORY) as llm:
        with pytest.raises(RequestError, match="KV pool"):
            llm.generate([[500], [501]], [greedy(), greedy(200, n=3)], use_tqdm=False)
        assert nothing_left(llm)


def test_a_failure_is_raised_and_the_engine_stays_usable(llm: LLM) -> None:
    with pytest.raises(GenerationError, match="not a number"):
        llm.generate([[500, 501], [FAIL, 1], [502]], greedy(500), use_tqdm=False)
    assert nothing_left(llm)
    assert llm.generate([500, 501], greedy(), use_tqdm=False)[0].outputs[0].token_ids == echo([500, 501], 8)


def test_ctrl_c_ends_all_and_the_engine_stays_usable(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_STEP", "0.002")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits that it is ignored
    with LLM(str(tiny_model_dir), loop_factory=FACTORY) as llm:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[500, 501]] * 20, greedy(2000), use_tqdm=False)
        assert nothing_left(llm)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert llm.generate([500], greedy(), use_tqdm=False)[0].outputs[0].token_ids == [500] * 8


def test_the_bar_goes_to_standard_error(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[500]] * 3, greedy(), use_tqdm=True)
    shown = capsys.readouterr()
    assert "3/3" in shown.err
    assert shown.out == ""


def test_seeds_make_a_call_repeatable(llm: LLM) -> None:
    first, second = llm.generate([[500], [501]], SamplingParams(max_tokens=2), use_tqdm=False)
    assert first.seed != second.seed
    (again,) = llm.generate([500], SamplingParams(max_tokens=2, seed=first.seed), use_tqdm=False)
    assert again.seed == first.seed
