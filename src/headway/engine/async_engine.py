"""The asynchronous engine: an engine process and the streams of its requests, in any asyncio program."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self

from headway.core.batch import Finished
from headway.core.config import SchedulerConfig
from headway.core.request import FinishReason, SamplingParams, Slo
from headway.core.timeline import Span
from headway.engine.client import EngineClient
from headway.engine.config import EngineConfig
from headway.engine.messages import Abort, Add, Alarm, EngineStats, Ready, Refused, Step, handles_of, token_ids_of
from headway.engine.resolve import resolve_model
from headway.engine.router import NO_SLO, Router, StepTimes, Tags
from headway.engine.startup import BUILD_LOOP, Model, Report, as_config, model_name, silent
from headway.engine.stream import Choice, EngineClosed, EngineDead, Stream
from headway.engine.text import Tokenizer
from headway.engine.validation import QueueFull

RECENT = 64
"""Requests whose ends tell how fast places come free."""
LONGEST_RETRY = 60.0
"""Seconds that a refused client is told to wait at most."""


class Engine:
    """Serves requests from a process of its own; belongs to the event loop that it was started on.

    ::

        async with await Engine.start("smollm2") as engine:
            async with engine.generate("Once upon", SamplingParams(max_tokens=32)) as stream:
                async for delta in stream:
                    print(delta.text, end="")

    `created`: unix time of the start. `stats`: the engine's latest snapshot, a tenth of a second old at most while it
    works. `scheduler_config`: how it schedules now, as `follow` or the watchdog left it; `num_alarms`: how often that
    had to act. `error`: why the engine ended, None while it lives. For metrics without a cost per token:
    `on_step` hooks get a StepTimes for each step that brought tokens; `on_finished` hooks get the engine's account of
    each choice (with its state times) and the Choice itself, once the engine has let go of it; `on_refused` hooks get
    the stream that the engine will not serve.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, client: EngineClient, ready: Ready) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.model_name = model_name(config)
        self.created = int(time.time())
        self.capacity = ready.capacity
        self.scheduler_config = replace(config.scheduler, max_num_seqs=ready.capacity.max_num_seqs)
        self.stats: EngineStats = ready.stats
        self.num_alarms = 0
        self.error: EngineDead | None = None
        self._client = client
        self._router = Router(tokenizer, ready.capacity.max_model_len, self._abort)
        self._ends: deque[float] = deque(maxlen=RECENT)
        self.on_finished.append(self._note_end)
        client.attach(self._receive, self._lose)

    @classmethod
    async def start(
        cls,
        model: Model = None,
        *,
        report: Report = silent,
        loop_factory: str = BUILD_LOOP,
        **overrides: Any,
    ) -> Self:
        """Starts an engine and waits until it can serve.

        `overrides` replace fields of the configuration or of its scheduler's. `report` gets start-up's lines for a
        person. `loop_factory`: "module:function" that builds another loop in the engine process.

        Raises:
            ModelError: the model cannot be found or read.
            EngineDead: the engine process could not start; one line says why.
        """
        config = as_config(model, overrides)
        path = str(await asyncio.to_thread(resolve_model, config.model))
        client = EngineClient(report)
        try:
            starting = asyncio.create_task(client.start(config, path, loop_factory))
            tokenizer, ready = await asyncio.gather(asyncio.to_thread(Tokenizer.load, path), starting)
            return cls(config, tokenizer, client, ready)
        except BaseException:
            await client.close()
            raise

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self.capacity.max_model_len

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._client.pid

    @property
    def on_step(self) -> list[Callable[[StepTimes], None]]:
        return self._router.on_step

    @property
    def on_refused(self) -> list[Callable[[Stream], None]]:
        return self._router.on_refused

    @property
    def on_finished(self) -> list[Callable[[Finished, Choice], None]]:
        return self._router.on_finished

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        slo: Slo = NO_SLO,
        tenant: str = "",
        request_class: str = "",
        region: str = "",
        cache_salt: str = "",
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> Stream:
        """Sends a request of `params.n` choices off and returns their stream.

        `add_special_tokens` applies to a text prompt (a chat template has put in its own). `param` is what the prompt
        is called in errors. Computed beginnings of prompts are shared only between requests of the same `cache_salt`.

        Raises:
            RequestError: it can never be served as asked. What only the engine knows the stream raises: Unattainable
                where its promise cannot be kept and such requests are refused.
            QueueFull: too many wait; try again later.
            EngineDead: the engine has ended.
        """
        if self.error is not None:
            raise EngineDead(str(self.error))
        self._check_queue(params.n)
        stream = self._router.prepare(
            prompt, params, request_id=request_id, add_special_tokens=add_special_tokens, param=param
        )
        tags = Tags(priority, slo, tenant, request_class, region, cache_salt)
        for request in self._router.open(stream, tags):
            self._client.send(Add(request))
        return stream

    def check_share(self, tenant: str, n: int) -> None:
        """For tenants who do not know of each other: each may have no more than half of the places, or than it leaves
        free, so that whoever comes next finds one (dynamic thresholds, Choudhury and Hahne 1998).

        Raises:
            QueueFull: `n` more of this tenant would be more.
        """
        own, places = self._router.num_live_of(tenant), self.capacity.max_num_seqs + self.config.max_waiting
        if own + n > places - self._router.num_live:
            raise QueueFull(
                f"{own} requests of tenant {tenant!r} are under way, which is its share of the {places} places: try "
                "again later",
                self._retry_after(n),
            )

    def _check_queue(self, n: int) -> None:
        live, seats, limit = self._router.num_live, self.capacity.max_num_seqs, self.config.max_waiting
        if live + n > seats + limit:
            raise QueueFull(
                f"{max(0, live - seats)} requests are waiting and at most {limit} may: try again later",
                self._retry_after(n),
            )

    def _retry_after(self, n: int) -> float:
        """Seconds until about n places come free, by how fast they did lately."""
        if len(self._ends) < 2:
            return 1.0
        pace = (time.monotonic() - self._ends[0]) / len(self._ends)
        return min(max(1.0, n * pace), LONGEST_RETRY)

    def _note_end(self, end: Finished, choice: Choice) -> None:
        self._ends.append(time.monotonic())

    async def abort(self, request_id: str) -> None:
        """Ends a request; without effect when none of that id is being served."""
        stream = self._router.streams.get(request_id)
        if stream is not None:
            stream.abort()

    async def ping(self) -> EngineStats:
        """A fresh snapshot, by a round trip through the engine's loop.

        Raises:
            EngineDead: the engine has ended.
        """
        if self.error is not None:
            raise EngineDead(str(self.error))
        return (await self._client.ping()).stats

    async def follow(self, config: SchedulerConfig) -> None:
        """Other strategies and limits from the next step on; requests in flight stay where they are.

        Start from `scheduler_config`, which then is `config`.

        Raises:
            ValueError: a name is unknown, or what memory was sized for at the start would change.
            EngineDead: the engine has ended.
        """
        if self.error is not None:
            raise EngineDead(str(self.error))
        followed = await self._client.follow(config)
        if followed.error is not None:
            raise ValueError(followed.error)
        self.scheduler_config = config

    async def timeline(self, handle: int) -> list[Span] | None:
        """Where the time of a choice (by its handle) has gone so far, on the monotonic clock; None when the engine has
        let go of it: its Finished has the whole.

        Raises:
            EngineDead: the engine has ended.
        """
        if self.error is not None:
            raise EngineDead(str(self.error))
        return (await self._client.trace(handle)).timeline

    async def close(self) -> None:
        """Ends every request and the engine process. Open streams raise EngineDead. May be called twice."""
        if self.error is None:
            self._lose(EngineClosed("the engine was closed"))
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _receive(self, event: Step | Refused | Alarm) -> None:
        if isinstance(event, Alarm):
            self.scheduler_config = event.config
            self.num_alarms += 1
            return
        if isinstance(event, Refused):
            self._router.refuse(event.handle, event.error)
            return
        if event.stats is not None:
            self.stats = event.stats
        self._router.deliver(handles_of(event), token_ids_of(event), event.logprobs, event.finished)

    def _abort(self, handle: int, reason: FinishReason) -> None:
        self._client.send(Abort(handle, reason))

    def _lose(self, error: EngineDead) -> None:
        self.error = error
        self._router.fail_all(error)
