"""What streaming a token costs the HTTP process: CPU time, with an engine whose executor takes none.

64 clients (one other process) stream completions from a real server, an HTTP process and an engine process. Paced,
every token is an event of its own: the dear case, since a reader that falls behind gets several tokens in one. Flat
out, the engine is as fast as it can be. The cost of a token holds all that the HTTP process does for it: receiving
from the engine, detokenising, JSON, server-sent events, sockets, metrics. What of it is the engine's part (receiving,
detokenising, streams) is shown by a program that reads the same streams without HTTP. Measured is from when all
streams have begun; what it costs to begin one is shown apart.

Bar: at most 30 us per token, paced.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
import psutil
from msgspec import Struct
from msgspec import json as msgjson
from rich.table import Table

from common import Verdict, arguments, measured, spread
from headway.core.batch import Batch, StepOutput
from headway.core.config import SchedulerConfig
from headway.core.request import SamplingParams
from headway.engine.api import Engine, EngineConfig, Stream
from headway.engine.loop import EngineLoop, make_scheduler
from headway.engine.startup import Report
from headway.engine.text import Tokenizer
from headway.executors.base import Capacity
from headway.server.run import serve

BAR = 30.0
"""Microseconds of CPU per token."""
STREAMS = 64
PROMPT = list(range(1000, 1016))
CONFIG = EngineConfig(scheduler=SchedulerConfig(max_batch_size=STREAMS))
FACTORIES = {"paced": "frontend:build_paced", "flat out": "frontend:build_flat_out"}
PACE = 0.008
"""Seconds of a paced step: 8,000 tokens per second."""
TEXT = (
    "Headway is the time between two trains. Static batching is a bus that leaves when it is full; continuous batching "
    "is a metro: doors open at every stop, whoever is ready gets on, whoever has arrived gets off - and naïve queues, "
    "1,024 of them, wait. "
)


class NullExecutor:
    """Computes nothing: every sequence recites `text`, a token a step. A step lasts `step_seconds`, spent asleep."""

    def __init__(self, text: list[int], capacity: Capacity, step_seconds: float) -> None:
        self._text = np.array(text, np.int32)
        self._capacity = capacity
        self._step_seconds = step_seconds
        self._due = 0.0

    def capacity(self) -> Capacity:
        return self._capacity

    def launch(self, batch: Batch) -> Batch:
        return batch

    def done(self, batch: Batch) -> bool:
        return False

    def collect(self, batch: Batch) -> StepOutput:
        now = time.monotonic()
        self._due = max(self._due + self._step_seconds, now)
        time.sleep(self._due - now)
        positions = (batch.starts + batch.num_tokens)[batch.samples]
        tokens = self._text[positions % len(self._text)]
        return StepOutput(batch.step_id, batch.samples.astype(np.int32), tokens)

    def close(self) -> None:
        pass


def build_paced(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """For the engine process."""
    return _build(config, model_path, PACE)


def build_flat_out(config: EngineConfig, model_path: str, report: Report) -> EngineLoop:
    """For the engine process."""
    return _build(config, model_path, 0.0)


def _build(config: EngineConfig, model_path: str, step_seconds: float) -> EngineLoop:
    text = Tokenizer.load(Path(model_path)).encode(TEXT)
    executor = NullExecutor(text, Capacity(1 << 14, 16, config.scheduler.seqs, 4096), step_seconds)
    return EngineLoop(make_scheduler(config, executor.capacity()), executor, time.monotonic)


# -- what is measured -------------------------------------------------------------------------------------------------


class Sample(Struct):
    """CPU seconds of the process under test: to begin STREAMS requests, and from then on, for `tokens` in `pieces`."""

    begin: float
    user: float
    kernel: float
    seconds: float
    tokens: float
    pieces: int

    @property
    def cost(self) -> float:
        """Microseconds of CPU per token."""
        return (self.user + self.kernel) / self.tokens * 1e6


class Meter:
    """CPU time of a process with all its threads."""

    def __init__(self, pid: int | None = None) -> None:
        self._process = psutil.Process(pid)
        self._before = self._process.cpu_times()

    def begun(self) -> None:
        """All streams have begun."""
        before, self._before = self._before, self._process.cpu_times()
        self._begin = sum(self._before[:2]) - sum(before[:2])
        self._since = time.perf_counter()

    def sample(self, tokens: float, pieces: int) -> Sample:
        """All streams have ended. `tokens`, `pieces`: since begun()."""
        now, before = self._process.cpu_times(), self._before
        seconds = time.perf_counter() - self._since
        return Sample(self._begin, now.user - before.user, now.system - before.system, seconds, tokens, pieces)


# -- this file in its other roles -------------------------------------------------------------------------------------


def be_server(mode: str) -> None:
    """The HTTP process."""
    sys.exit(serve(CONFIG, "127.0.0.1", 0, loop_factory=FACTORIES[mode]))


def be_clients(url: str, tokens: int) -> None:
    """Reads STREAMS completions to their ends.

    Prints a line when all have begun, then the tokens since and the events in which they came.
    """
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "ignore_eos": True, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(body)}\r\n\r\n"
    request = (head + body).encode()
    streams = [bytearray() for _ in range(STREAMS)]
    begun: list[int] = []

    async def read(received: bytearray) -> None:
        reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
        writer.write(request)
        while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            part = await reader.read(65536)
            if not part:
                raise SystemExit(f"the server closed early: {bytes(received[-200:])!r}")
            received += part
            if not begun and all(map(len, streams)):
                begun.extend(map(len, streams))
                print("begun", flush=True)
        writer.close()

    async def read_all() -> None:
        await asyncio.gather(*map(read, streams))

    asyncio.run(read_all())
    after = [bytes(received[at:]) for received, at in zip(streams, begun, strict=True)]
    chars, pieces = map(sum, zip(*map(_texts, after), strict=True))
    all_chars = sum(_texts(bytes(received))[0] for received in streams)
    print(json.dumps([chars / all_chars * tokens * STREAMS, pieces]))


def _texts(received: bytes) -> tuple[int, int]:
    """Characters of text, and events that hold some."""
    texts = [json.loads(text) for text in re.findall(rb'"text":("(?:[^"\\]|\\.)*")', received)]
    return sum(map(len, texts)), len(texts)


def be_reader(mode: str, tokens: int, rounds: int) -> None:
    """Reads the same streams without HTTP and prints a Sample a round, but for the first one."""

    async def one_round(engine: Engine) -> Sample:
        meter, seen = Meter(), [0] * STREAMS
        before: list[int] = []
        pieces = 0

        async def read(i: int, stream: Stream) -> None:
            nonlocal pieces
            async for delta in stream:
                seen[i] = delta.completion_tokens
                pieces += 1
                if not before and all(seen):
                    before.extend(seen)
                    pieces = 0
                    meter.begun()

        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        streams = [engine.generate(PROMPT, params) for _ in range(STREAMS)]
        await asyncio.gather(*(read(i, stream) for i, stream in enumerate(streams)))
        return meter.sample(sum(seen) - sum(before), pieces)

    async def run() -> list[Sample]:
        async with await Engine.start(CONFIG, loop_factory=FACTORIES[mode]) as engine:
            return [await one_round(engine) for _ in range(rounds + 1)]

    import uvloop

    print(msgjson.encode(uvloop.run(run())[1:]).decode())


# -- the benchmark ----------------------------------------------------------------------------------------------------


def _role(*words: object) -> list[str]:
    return [sys.executable, __file__, "--as", *map(str, words)]


@contextmanager
def _started(*words: object) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A process in another role, and its output."""
    process = subprocess.Popen(_role(*words), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield process, process.stdout
        finally:
            process.terminate()
            process.wait()


def over_http(mode: str, tokens: int, rounds: int) -> list[Sample]:
    """CPU of the HTTP process, a sample a round, after one to warm up."""
    samples = []
    with _started("server", mode) as (server, said):
        url = next(line for line in said if "http://" in line).split(" at ")[1].strip()
        for _ in range(rounds + 1):
            meter = Meter(server.pid)
            with _started("clients", url, tokens) as (_, answer):
                assert next(answer).strip() == "begun"
                meter.begun()
                samples.append(meter.sample(*json.loads(next(answer))))
    return samples[1:]


def without_http(mode: str, tokens: int, rounds: int) -> list[Sample]:
    """CPU of a program that reads the streams, a sample a round."""
    with _started("reader", mode, tokens, rounds) as (_, answer):
        return msgjson.decode(next(answer), type=list[Sample])


def tabulate(results: dict[str, list[Sample]]) -> Table:
    columns = ("", "us per token", "user + kernel", "tok/event", "tokens/s", "us to begin")
    table = Table(*columns, title=f"CPU time, {STREAMS} streams")
    for name, samples in results.items():
        user = median(s.user / s.tokens for s in samples) * 1e6
        kernel = median(s.kernel / s.tokens for s in samples) * 1e6
        table.add_row(
            name,
            spread([s.cost for s in samples]),
            f"{user:.1f} + {kernel:.1f}",
            f"{median(s.tokens / s.pieces for s in samples):.2f}",
            f"{median(s.tokens / s.seconds for s in samples):,.0f}",
            f"{median(s.begin / STREAMS for s in samples) * 1e6:,.0f}",
        )
    return table


def run(args: argparse.Namespace) -> int:
    paced, flat_out, rounds = (256, 512, 5) if args.quick else (512, 2048, 9)
    results: dict[str, list[Sample]] = {}
    with measured() as watch:
        results["HTTP, paced"] = over_http("paced", paced, rounds)
        results["engine, paced"] = without_http("paced", paced, rounds)
        results["HTTP, flat out"] = over_http("flat out", flat_out, rounds)
        results["engine, flat out"] = without_http("flat out", flat_out, rounds)
    cost = median(sample.cost for sample in results["HTTP, paced"])
    merged = median(sample.tokens / sample.pieces for sample in results["HTTP, paced"])
    verdict = Verdict(
        tabulate(results),
        f"A streamed token costs the HTTP process {cost:.1f} us of CPU (bar: {BAR:.0f} us) "
        f"at {merged:.2f} tokens per event.",
        cost <= BAR,
        {name: [msgjson.decode(msgjson.encode(sample)) for sample in samples] for name, samples in results.items()},
        ["--quick: half as many tokens a round, five rounds instead of nine"] if args.quick else [],
        watch.others,
    )
    return verdict.conclude(args)


def main() -> int:
    roles: dict[str, Callable[..., Any]] = {"server": be_server, "clients": be_clients, "reader": be_reader}
    if sys.argv[1:2] == ["--as"]:
        roles[sys.argv[2]](*(int(word) if word.isdigit() else word for word in sys.argv[3:]))
        return 0
    return run(arguments(__doc__).parse_args())


if __name__ == "__main__":
    sys.exit(main())
