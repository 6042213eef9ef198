"""The load generator: sends a workload to an OpenAI-compatible server, as a closed or an open loop, and times it.

Closed loop: `concurrency` users, each of whom sends a request when the last one is answered. Open loop: requests
fall due at seeded Poisson arrivals whatever the server does. A request's clock starts when it was due, so time
spent waiting in this client (for a slot, where both a rate and a concurrency are given) counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import aiohttp

from headway.lab.workload import Item

Endpoint = Literal["completions", "chat"]


class LoadError(RuntimeError):
    """The server cannot be tested at all; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `base_url` is the server's root, with or without /v1; `extra` joins each body."""

    base_url: str
    model: str
    endpoint: Endpoint = "completions"
    api_key: str | None = None
    ignore_eos: bool = False
    temperature: float = 0.0
    extra: dict[str, Any] = field(default_factory=dict)

    def url(self) -> str:
        path = "completions" if self.endpoint == "completions" else "chat/completions"
        return f"{_root(self.base_url)}/v1/{path}"

    def body(self, item: Item) -> dict[str, Any]:
        """The JSON body that asks for `item`."""
        if self.endpoint == "chat":
            messages = [{"role": "user", "content": item.prompt}] if isinstance(item.prompt, str) else item.prompt
            body: dict[str, Any] = {"messages": messages}
        else:
            body = {"prompt": item.prompt}
        body |= {"model": self.model, "max_tokens": item.output_len, "temperature": self.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra


@dataclass(slots=True)
class Result:
    """One request's history. Times are seconds after the test began; None for what never happened.

    `chunks` are the arrival times of the pieces of the answer that held tokens, `end` that of its last piece or
    of its failure. `output_tokens` is the server's count where it sends usage, else (`counted`) the number of
    chunks.
    """

    wanted: int
    due: float
    sent: float
    chunks: list[float] = field(default_factory=list)
    end: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0
    counted: bool = False
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def short(self) -> bool:
        """Answered, but with fewer tokens than wanted."""
        return self.ok and self.output_tokens < self.wanted

    @property
    def ttft(self) -> float | None:
        return self.chunks[0] - self.due if self.chunks else None

    @property
    def e2e(self) -> float | None:
        return self.end - self.due if self.end is not None else None

    @property
    def tpot(self) -> float | None:
        """Mean seconds per output token after the first; None where there is but one."""
        if self.end is None or not self.chunks or self.output_tokens < 2:
            return None
        return (self.end - self.chunks[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Gaps between chunks."""
        return [later - earlier for earlier, later in zip(self.chunks, self.chunks[1:], strict=False)]


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """`count` arrival times in seconds, the gaps exponential with mean 1 / `rate`; all zero for an infinite one."""
    if math.isinf(rate):
        return [0.0] * count
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        arrivals.append(now)
    return arrivals


async def first_model(base_url: str, api_key: str | None = None) -> str:
    """The id of the first model that the server lists.

    Raises:
        LoadError: no server answers there, or not with a list of models.
    """
    url = f"{_root(base_url)}/v1/models"
    timeout = aiohttp.ClientTimeout(total=10)
    try:
        async with aiohttp.ClientSession(headers=_headers(api_key), timeout=timeout) as session:
            reply = await session.get(url)
            if reply.status != 200:
                raise LoadError(f"{url} answered {reply.status}: {_message(await reply.text())}")
            return str((await reply.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(
            f"no server answers at {base_url} ({error or type(error).__name__}). "
            "Start one with `headway serve`, or name another by --base-url"
        ) from None
    except (KeyError, IndexError, TypeError, ValueError):
        raise LoadError(f"{url} lists no model; name one by --model") from None


@dataclass(slots=True)
class LoadTest:
    """One run over `items`: at `rate` requests per second (None: a closed loop) and at most `concurrency` at a time.

    `watch` is called with each result when it ends. A request that takes longer than `timeout` seconds fails.
    """

    target: Target
    items: Sequence[Item]
    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0
    timeout: float = 3600.0
    watch: Callable[[Result], None] = lambda result: None
    started: float = 0.0

    async def run(self) -> list[Result]:
        """Send everything, wait for every answer; results in the items' order. Nothing is sent twice."""
        connector = aiohttp.TCPConnector(limit=0, force_close=True)  # each request is a user of its own
        timeout = aiohttp.ClientTimeout(total=self.timeout, sock_connect=min(30.0, self.timeout))
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=_headers(self.target.api_key), read_bufsize=2**20
        ) as session:
            self.started = perf_counter()
            if self.rate is None:
                return await self._closed(session, self.concurrency or 1)
            return await self._open(session, poisson_arrivals(len(self.items), self.rate, self.seed))

    async def _closed(self, session: aiohttp.ClientSession, users: int) -> list[Result]:
        results: list[Result | None] = [None] * len(self.items)
        queue = iter(enumerate(self.items))

        async def user() -> None:
            for index, item in queue:
                results[index] = await self._request(session, item, due=self._now())

        await asyncio.gather(*(user() for _ in range(users)))
        return [result for result in results if result is not None]

    async def _open(self, session: aiohttp.ClientSession, arrivals: list[float]) -> list[Result]:
        slots = asyncio.Semaphore(self.concurrency) if self.concurrency else nullcontext()

        async def request(item: Item, due: float) -> Result:
            async with slots:
                return await self._request(session, item, due)

        async with asyncio.TaskGroup() as group:
            tasks = []
            for item, due in zip(self.items, arrivals, strict=True):
                if (wait := due - self._now()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(request(item, due)))
        return [task.result() for task in tasks]

    async def _request(self, session: aiohttp.ClientSession, item: Item, due: float) -> Result:
        result = Result(wanted=item.output_len, due=due, sent=self._now())
        try:
            async with session.post(self.target.url(), json=self.target.body(item)) as reply:
                if reply.status != 200:
                    result.error = f"{reply.status} {_message(await reply.text())}"
                else:
                    await self._read(reply, result)
        except aiohttp.ClientError as error:
            result.error = f"{type(error).__name__}: {error}"
        except TimeoutError:
            result.error = f"no end within {self.timeout:g} s"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            result.error = f"the answer was not understood ({type(error).__name__}: {error})"
        if result.error is not None:
            result.end = self._now()
        self.watch(result)
        return result

    async def _read(self, reply: aiohttp.ClientResponse, result: Result) -> None:
        done = False
        async for data, now in self._events(reply):
            if data == b"[DONE]":
                done = True
                break
            event = json.loads(data)
            if "error" in event:
                result.error = _message(data.decode())
                return
            if usage := event.get("usage"):
                result.prompt_tokens, result.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            for choice in event.get("choices", ()):
                result.end = now
                result.finish_reason = choice.get("finish_reason") or result.finish_reason
                if _holds_tokens(choice) or (choice.get("finish_reason") and not result.chunks):
                    result.chunks.append(now)
        if result.output_tokens == 0 and result.chunks:
            result.output_tokens, result.counted = len(result.chunks), True
        if not done and result.finish_reason is None:
            result.error = "the stream ended before its answer did"
        elif not result.chunks:
            result.error = "the answer was empty"

    async def _events(self, reply: aiohttp.ClientResponse) -> AsyncIterator[tuple[bytes, float]]:
        """The payloads of a server-sent event stream, each with the time at which its bytes came."""
        rest = b""
        async for piece in reply.content.iter_any():
            now = self._now()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip(), now

    def _now(self) -> float:
        return perf_counter() - self.started


def _holds_tokens(choice: dict[str, Any]) -> bool:
    """Whether a chunk stands for generated tokens, and not only for a role or an end.

    A completion's text may be empty while a character is not yet complete: that is a token all the same.
    """
    if "text" in choice:
        return bool(choice["text"]) or not choice.get("finish_reason")
    delta = choice["delta"]
    return any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls"))


def _message(text: str) -> str:
    """The message in an OpenAI-style error, else the beginning of the text."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return text.strip()[:200] or "(no message)"


def _root(base_url: str) -> str:
    return base_url.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}
