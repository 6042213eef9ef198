"""The engines that peers.py drives: each is started, given loads one after the other, and stopped.

What runs in process runs in a process of its own that takes loads on its standard input; servers are driven over HTTP.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.lab.load import LoadTest, Target, poisson_arrivals
from headway.lab.workload import Item

HERE = Path(__file__).parent
START_WITHIN = 600.0
"""Seconds; vLLM takes two minutes."""
MAX_NUM_SEQS, LLAMA_SLOTS = 128, 64


@dataclass(frozen=True, slots=True)
class Load:
    """Requests from `file`, `users` at a time, or as they fall due at `rate` per second (Poisson, drawn by `seed`)."""

    file: str
    count: int
    users: int
    rate: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a load came to: seconds from the first request to the last token; of each answered request the time to its
    first token and (nan where it has but one) the mean time per further token; tokens; and what went wrong."""

    seconds: float
    output_tokens: int
    ttft: list[float]
    tpot: list[float]
    failed: int
    short: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


class Engine(Protocol):
    """An engine that is up."""

    def drive(self, load: Load, items: Sequence[Item]) -> Sample: ...


class Piped:
    """An engine in a process that reads a load as a line of JSON and answers with a line that is a Sample."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def drive(self, load: Load, items: Sequence[Item]) -> Sample:
        requests = [{"prompt": item.prompt, "output_len": item.output_len} for item in items]
        arrivals = None if load.rate is None else poisson_arrivals(len(items), load.rate, load.seed)
        return Sample(**self._ask({"requests": requests, "users": load.users, "arrivals": arrivals}))

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"the engine ended: {self._process.args}")


class Http:
    """A server that speaks OpenAI's completions."""

    def __init__(self, url: str, model: str) -> None:
        self._target = Target(url, model, ignore_eos=True)

    def drive(self, load: Load, items: Sequence[Item]) -> Sample:
        users = None if load.rate is not None else load.users
        test = LoadTest(self._target, items, concurrency=users, rate=load.rate, seed=load.seed)
        results = asyncio.run(test.run())
        good = [result for result in results if result.ok]
        first, last = min(r.sent for r in results), max(r.end or 0.0 for r in results)
        return Sample(
            seconds=last - first,
            output_tokens=sum(result.output_tokens for result in good),
            ttft=[result.ttft for result in good if result.ttft is not None],
            tpot=[float("nan") if result.tpot is None else result.tpot for result in good],
            failed=len(results) - len(good),
            short=sum(result.short for result in good),
        )


@contextmanager
def piped(command: Sequence[str | Path], env: dict[str, str] | None = None) -> Iterator[Engine]:
    with _process(command, env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield Piped(process)


@contextmanager
def served(command: Sequence[str | Path], port: int, model: str, env: dict[str, str] | None = None) -> Iterator[Engine]:
    """A server that is ready when GET /health answers 200.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise RuntimeError(f"something listens on port {port} already: stop it first")
    with _process(command, env, stdout=subprocess.DEVNULL) as process:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_WITHIN
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"this server did not start: {' '.join(map(str, command))}")
            time.sleep(0.2)
        yield Http(url, model)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def _process(
    command: Sequence[str | Path], env: dict[str, str] | None, **pipes: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, so that all that it starts can be stopped with it."""
    process = subprocess.Popen(
        [str(word) for word in command],
        env=os.environ | (env or {}),
        text=True,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
        **pipes,
    )
    try:
        yield process
    finally:
        for number, within in ((signal.SIGTERM, 20), (signal.SIGKILL, 20)):
            try:
                os.killpg(process.pid, number)
                process.wait(within)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue


@dataclass(frozen=True, slots=True)
class Peers:
    """The folder that holds the peers and the model for them; `precision` is of the weights."""

    folder: Path
    model: str
    precision: str

    def engines(self) -> dict[str, Any]:
        """By name a context manager that starts it. Those of headway come first."""
        known = {
            "headway": self._headway,
            "headway serve": self._headway_serve,
            "OpenVINO": self._openvino,
            "vLLM": self._vllm,
            "llama.cpp": self._llamacpp,
        }
        return {name: start for name, start in known.items() if self._has(name)}

    def _has(self, name: str) -> bool:
        needs = {
            "OpenVINO": [self.folder / "openvino", self.folder / f"model-ov-{self._openvino_format}"],
            "vLLM": [self.folder / "vllm", self.folder / "model-bf16"],
            "llama.cpp": [self.folder / "llamacpp", self._gguf],
        }
        if name == "vLLM" and self.precision == "int8":
            return False
        return all(path.exists() for path in needs.get(name, ()))

    @property
    def _openvino_format(self) -> str:
        return "int8" if self.precision == "int8" else "fp16"

    @property
    def _gguf(self) -> Path:
        return self.folder / f"model-{'q8_0' if self.precision == 'int8' else 'bf16'}.gguf"

    def _headway(self) -> Any:
        return piped([sys.executable, HERE / "headway_peer.py", self.model, *headway_flags(self.precision)])

    def _headway_serve(self) -> Any:
        command: list[str | Path] = [sys.executable, "-m", "headway", "serve", self.model, "--port", "8002"]
        command += ["--no-prefix-caching", "--max-batch-size", str(MAX_NUM_SEQS), "--max-num-batched-tokens", "512"]
        command += ["--served-model-name", "m", *headway_flags(self.precision)]
        return served(command, 8002, "m")

    def _openvino(self) -> Any:
        python = self.folder / "openvino" / "bin" / "python"
        return piped([python, "-P", HERE / "openvino_peer.py", self.folder / f"model-ov-{self._openvino_format}"])

    def _vllm(self) -> Any:
        folder = self.folder / "vllm"
        env = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": "0-1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "LD_PRELOAD": f"/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4:{folder / 'lib' / 'libiomp5.so'}",
        }
        command = [folder / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--host", "127.0.0.1", "--port", "8000", "--dtype", "bfloat16", "--no-enable-prefix-caching"]
        command += ["--model", self.folder / "model-bf16", "--served-model-name", "m"]
        command += ["--max-model-len", "4096", "--max-num-seqs", str(MAX_NUM_SEQS)]
        return served(command, 8000, "m", env)

    def _llamacpp(self) -> Any:
        command = [self.folder / "llamacpp" / "bin" / "llama-server", "-m", self._gguf, "-a", "m"]
        command += ["--host", "127.0.0.1", "--port", "8001", "-t", "2", "-tb", "2", "--parallel", str(LLAMA_SLOTS)]
        command += ["-c", str(LLAMA_SLOTS * 2304), "-b", "2048", "-ub", "512", "-cb", "-fa", "on"]
        return served([*command, "--no-warmup", "--cache-ram", "0"], 8001, "m")


def headway_flags(precision: str) -> list[str]:
    """headway's own, for weights of this precision."""
    return ["--quantization", "int8"] if precision == "int8" else ["--dtype", precision]
