"""The engine in its own process: it says what was computed, and no end of either side leaves anything behind."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from headway.core.request import RequestError, SamplingParams
from headway.engine.api import Engine, EngineDead, EngineStats, GenerationError, QueueFull, Stream
from tests.engine.echo import BREAK, FAIL, MAX_MODEL_LEN, echo

FACTORY = "tests.engine.echo:build_loop"
PROMPT = list(range(500, 540))
ROOT = Path(__file__).parents[2]


async def start(model: Path, **settings: object) -> Engine:
    settings.setdefault("loop_factory", FACTORY)
    return await Engine.start(str(model), **settings)


@pytest.fixture
async def engine(tiny_model_dir: Path) -> AsyncIterator[Engine]:
    async with await start(tiny_model_dir) as engine:
        yield engine


@pytest.fixture
async def slow_engine(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    """5 ms a step, so that things can be done in the middle."""
    monkeypatch.setenv("ECHO_STEP", "0.005")
    async with await start(tiny_model_dir) as engine:
        yield engine


def ask(engine: Engine, prompt: list[int] | str = PROMPT, max_tokens: int = 50, **params: object) -> Stream:
    return engine.generate(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params))


async def until(true: Callable[[], bool], within: float = 5.0) -> None:
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def settled(engine: Engine) -> EngineStats:
    """The stats once the engine has let go of everything."""
    deadline = time.monotonic() + 5.0
    while (stats := await engine.ping()).num_running or stats.num_waiting or stats.kv_usage:
        assert time.monotonic() < deadline, stats
    return stats


# -- what is generated -------------------------------------------------------------------------------------------------


async def test_streamed_is_whole_is_what_was_computed(engine: Engine) -> None:
    async def streamed(stream: Stream) -> tuple[str, list[int]]:
        deltas = [delta async for delta in stream]
        return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids]

    async def whole(stream: Stream) -> tuple[str, list[int]]:
        (delta,) = await stream.collect()
        return delta.text, delta.token_ids

    prompts = [[*range(600 + i, 600 + i + length)] for i, length in enumerate([1, 3, 20, 100, 700, 40] * 4)]
    answers = await asyncio.gather(
        *[streamed(ask(engine, prompt)) for prompt in prompts], *[whole(ask(engine, prompt)) for prompt in prompts]
    )
    expected = [(engine.tokenizer.decode(ids), ids) for prompt in prompts if (ids := echo(prompt, 50))]
    assert answers == expected * 2


async def test_text_prompts_choices_and_logprobs(engine: Engine) -> None:
    stream = engine.generate("Hello there, world", SamplingParams(n=3, max_tokens=5, logprobs=2))
    assert stream.prompt_token_ids == engine.tokenizer.encode("Hello there, world")
    deltas = await stream.collect()
    assert [d.index for d in deltas] == [0, 1, 2]
    for delta in deltas:
        assert delta.token_ids == echo(stream.prompt_token_ids, 5)
        assert delta.logprobs is not None
        assert [(of.logprob, of.top_ids) for of in delta.logprobs] == [
            (-float(len(stream.prompt_token_ids) + i), [t, t + 1]) for i, t in enumerate(delta.token_ids)
        ]


async def test_a_stop_string_frees_the_request_in_the_engine(engine: Engine) -> None:
    prompt = engine.tokenizer.encode("one two three four")
    stream = ask(engine, prompt, max_tokens=1500, stop=["ee fo"])
    (delta,) = await stream.collect()
    assert (delta.text, delta.stop_reason) == ("one two thr", "ee fo")
    assert (await settled(engine)).num_steps < 1500


async def test_a_stop_token_ends_it_in_the_engine(engine: Engine) -> None:
    stream = ask(engine, [700, 701, 702], stop_token_ids=[702])
    (delta,) = await stream.collect()
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == ([700, 701, 702], "stop", 702)


async def test_a_slow_reader_stalls_nobody_and_loses_nothing(engine: Engine) -> None:
    slow = ask(engine, max_tokens=1000)
    first = await anext(slow)
    start = time.monotonic()
    await asyncio.gather(*[ask(engine, max_tokens=200).collect() for _ in range(8)])
    assert time.monotonic() - start < 5.0
    await until(lambda: slow.done)
    rest = [delta async for delta in slow]
    assert len(rest) <= 2
    assert first.token_ids + [t for d in rest for t in d.token_ids] == echo(PROMPT, 1000)


# -- what is given back ------------------------------------------------------------------------------------------------


async def test_closing_a_hundred_streams_returns_every_block(slow_engine: Engine) -> None:
    streams = [ask(slow_engine, max_tokens=1500) for _ in range(100)]
    await asyncio.gather(*[anext(stream) for stream in streams[:60]])
    busy = await slow_engine.ping()
    assert busy.kv_usage > 0
    assert busy.num_running + busy.num_waiting == 100
    for stream in streams:
        await stream.aclose()
    aborted = await slow_engine.ping()  # went off in one message with the aborts
    assert aborted.num_running + aborted.num_waiting == 0
    assert (await settled(slow_engine)).num_steps - aborted.num_steps <= slow_engine.config.scheduler.depth


async def test_abort_by_id(slow_engine: Engine) -> None:
    stream = slow_engine.generate(PROMPT, SamplingParams(max_tokens=1000), request_id="mine")
    await anext(stream)
    await slow_engine.abort("mine")
    await slow_engine.abort("never heard of")
    assert [delta.finish_reason async for delta in stream][-1] == "abort"
    await settled(slow_engine)


async def test_ends_come_with_the_engines_account(engine: Engine) -> None:
    ends = []
    engine.on_finished.append(lambda end, choice: ends.append((end, choice)))
    stream = ask(engine, max_tokens=7)
    await stream.collect()
    await until(lambda: bool(ends))
    ((end, choice),) = ends
    assert choice is stream.choices[0]
    assert (end.id, end.prompt_len, end.output_len) == (stream.request_id, len(PROMPT), 7)
    assert sum(end.state_times.values()) == pytest.approx(end.finished - end.arrival, abs=1e-6)
    assert end.arrival == stream.arrival


# -- what is refused ---------------------------------------------------------------------------------------------------


async def test_bad_requests_are_refused_at_once(engine: Engine) -> None:
    for prompt, params in [
        ([], SamplingParams()),
        ("", SamplingParams()),
        ([10**9], SamplingParams()),
        (PROMPT, SamplingParams(max_tokens=MAX_MODEL_LEN)),
        ([1] * MAX_MODEL_LEN, SamplingParams(max_tokens=None)),
    ]:
        with pytest.raises(RequestError):
            engine.generate(prompt, params)
    assert (await engine.ping()).num_steps == 0


async def test_the_engines_own_refusal_is_a_request_error(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO_BLOCKS", "4")
    async with await start(tiny_model_dir) as engine:
        stream = ask(engine, max_tokens=500)
        with pytest.raises(RequestError, match="KV pool"):
            await stream.collect()
        assert (await ask(engine, max_tokens=5).collect())[0].token_ids == echo(PROMPT, 5)


async def test_a_full_queue_refuses_with_a_hint(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_STEP", "0.005")
    async with await start(tiny_model_dir, max_waiting=3, max_batch_size=2, max_num_seqs=2) as engine:
        streams = [ask(engine, max_tokens=100) for _ in range(5)]
        with pytest.raises(QueueFull) as caught:
            ask(engine)
        assert caught.value.code == "rate_limit_exceeded"
        assert 1 <= caught.value.retry_after <= 60
        streams[0].abort()
        await engine.ping()  # its end has come when this returns
        assert (await ask(engine, max_tokens=1).collect())[0].finish_reason == "length"
        for stream in streams:
            stream.abort()


async def test_what_cannot_be_sent_is_its_senders_fault_and_keeps_nobody_waiting(engine: Engine) -> None:
    waiting = ask(engine)
    with pytest.raises(OverflowError):
        engine.generate(PROMPT, SamplingParams(max_tokens=5), priority=10**30)
    assert (await waiting.collect())[0].token_ids == echo(PROMPT, 50)
    assert (await ask(engine).collect())[0].token_ids == echo(PROMPT, 50)


async def test_a_wait_of_ages_can_be_cut_short(tiny_model_dir: Path) -> None:
    async with await start(tiny_model_dir, batching="static", static_timeout=1e300) as engine:
        stream = ask(engine)
        assert (await engine.ping()).num_waiting == 1
        await asyncio.sleep(0.05)  # it sleeps
        await engine.follow(dataclasses.replace(engine.scheduler_config, batching="inflight"))
        assert (await stream.collect())[0].token_ids == echo(PROMPT, 50)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


async def test_a_failed_step_ends_its_requests_only(engine: Engine) -> None:
    with pytest.raises(GenerationError, match="FloatingPointError: not a number"):
        await ask(engine, [FAIL, 1]).collect()
    assert (await ask(engine).collect())[0].token_ids == echo(PROMPT, 50)
    await settled(engine)


async def test_a_broken_loop_ends_all_streams_with_one_line(slow_engine: Engine) -> None:
    streams = [ask(slow_engine, max_tokens=1500) for _ in range(3)]
    await anext(streams[0])
    streams.append(ask(slow_engine, [BREAK]))
    for stream in streams:
        with pytest.raises(EngineDead, match=r"^the engine failed: RuntimeError: this is broken beyond repair$"):
            await stream.collect()
    with pytest.raises(EngineDead, match="broken"):
        ask(slow_engine)
    with pytest.raises(EngineDead, match="broken"):
        await slow_engine.ping()
    assert str(slow_engine.error).count("\n") == 0


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
async def test_an_engine_that_is_killed_ends_all_streams(slow_engine: Engine, sent: signal.Signals) -> None:
    streams = [ask(slow_engine, max_tokens=1500) for _ in range(20)]
    await anext(streams[0])
    os.kill(slow_engine.pid or 0, sent)
    started = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDead, match=sent.name):
            await stream.collect()
    assert time.monotonic() - started < 2.0


async def test_interrupting_the_engine_process_does_nothing(engine: Engine) -> None:
    os.kill(engine.pid or 0, signal.SIGINT)
    assert (await ask(engine).collect())[0].token_ids == echo(PROMPT, 50)


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("bad_model", r"^the pool holds 3 tokens: raise --kv-cache-memory$"),
        ("bad_code", r"^KeyError: 'w_q'$"),
        ("sudden_end", r"^the engine process ended with exit code 3$"),
        ("no_such_factory", r"no_such_factory"),
    ],
)
async def test_a_failed_start_is_one_line(tiny_model_dir: Path, factory: str, says: str) -> None:
    with pytest.raises(EngineDead, match=says):
        await start(tiny_model_dir, loop_factory=f"tests.engine.echo:{factory}")


async def test_startup_reports_to_a_person(tiny_model_dir: Path) -> None:
    lines: list[str] = []
    async with await start(tiny_model_dir, report=lines.append) as engine:
        assert lines == [f"echoing {tiny_model_dir.name}"]
        assert engine.max_model_len == MAX_MODEL_LEN
        assert engine.model_name == str(tiny_model_dir)


async def test_unknown_settings_are_named(tiny_model_dir: Path) -> None:
    with pytest.raises(TypeError, match="max_num_sequences"):
        await start(tiny_model_dir, max_num_sequences=3)


@pytest.mark.parametrize(("name", "value"), [("dtype", "float8"), ("max_model_len", "2k"), ("max_batch_size", 0)])
async def test_wrong_settings_are_named(tiny_model_dir: Path, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        await start(tiny_model_dir, **{name: value})


# -- what is left behind -----------------------------------------------------------------------------------------------


def sockets_of(engine: Engine) -> Path:
    return Path(engine._client._folder)


async def test_close_leaves_nothing(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_STEP", "0.005")
    await asyncio.to_thread(lambda: None)
    threads, children = threading.active_count(), psutil.Process().children()
    engine = await start(tiny_model_dir)
    stream = ask(engine, max_tokens=1500)
    await anext(stream)
    folder, pid = sockets_of(engine), engine.pid
    assert folder.stat().st_mode & 0o777 == 0o700
    await engine.close()
    await engine.close()
    with pytest.raises(EngineDead, match="closed"):
        [delta async for delta in stream]
    with pytest.raises(EngineDead, match="closed"):
        ask(engine)
    assert not folder.exists()
    assert not psutil.pid_exists(pid or 0)
    assert psutil.Process().children() == children
    assert threading.active_count() <= threads + 1  # asyncio's own pool may have grown
    gc.collect()  # an unclosed socket or process would warn


async def test_a_start_that_is_called_off_leaves_nothing(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    children = psutil.Process().children()
    starting = asyncio.create_task(start(tiny_model_dir, loop_factory="tests.engine.echo:never_ready"))
    await until(lambda: len(psutil.Process().children()) > len(children))
    await asyncio.sleep(0.2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert psutil.Process().children() == children


PARENT = f"""
import asyncio, sys
from headway.engine.api import Engine, SamplingParams
async def main():
    engine = await Engine.start(sys.argv[1], loop_factory={FACTORY!r})
    stream = engine.generate([700] * 10, SamplingParams(max_tokens=2000, ignore_eos=True))
    await anext(stream)
    print(engine.pid, engine._client._folder, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_an_orphan_ends_by_itself(tiny_model_dir: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "ECHO_STEP": "0.005"}
    command = [sys.executable, "-c", PARENT, str(tiny_model_dir)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.kill()
    await until(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
    assert not Path(folder).exists()


def test_the_front_end_needs_no_torch() -> None:
    code = "import sys, headway.engine.api; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


# -- the watchdog -----------------------------------------------------------------------------------------------------


async def test_a_stuck_engine_gets_going_again(tiny_model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody would ever be let in. After a while the requests are served, and the front end knows how."""
    async with await start(tiny_model_dir, loop_factory="tests.engine.echo:stuck", watchdog_seconds=0.2) as engine:
        assert engine.scheduler_config.batching == "inflight"
        streams = [ask(engine) for _ in range(5)]
        for stream in streams:
            (delta,) = await stream.collect()
            assert delta.token_ids == echo(PROMPT, 50)
        assert engine.num_alarms == 1
        assert engine.scheduler_config.batching == "continuous"
    said = capfd.readouterr().err
    assert "headway watchdog: nothing was admitted or computed for 0.2 s" in said
    assert "strategies: Shut" in said


async def test_timelines_of_live_requests_are_told(slow_engine: Engine) -> None:
    stream = ask(slow_engine, max_tokens=1000)
    await anext(stream)
    handle = stream.choices[0].handle
    timeline = await slow_engine.timeline(handle)
    assert timeline is not None
    assert timeline[0].start == stream.arrival
    assert timeline[-1].state == "decode"
    await stream.aclose()
    await settled(slow_engine)
    assert await slow_engine.timeline(handle) is None
