"""What the routes share: the engine, once there is one, its prompts and its tally."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core.request import NO_SLO, RequestError, SamplingParams
from headway.server.errors import FAILURES, ApiError
from headway.server.metrics import Exposition
from headway.server.outbox import Outbox
from headway.server.prompts import Prompt, PromptReader
from headway.server.quota import Quota, quotas
from headway.server.settings import ServerSettings
from headway.server.tally import Tally
from headway.server.timelines import Timelines

if TYPE_CHECKING:
    from headway.engine.api import Engine, Stream
    from headway.server.params import Terms

TOKENIZER_THREADS = 2


class Service:
    """The state behind an app. Serves once an engine is attached; refuses with 503 before that and after its end."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.tally = Tally()
        self.timelines = Timelines()
        self.quotas: dict[str, Quota] = quotas(settings.keys.rates) if settings.keys is not None else {}
        self.changing = asyncio.Lock()
        """Held by whoever changes how requests are scheduled, from reading what is so to its being followed."""
        self.outbox = Outbox()
        self.stopping = False
        self._engine: Engine | None = None
        self._workers = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    def attach(self, engine: Engine) -> None:
        """From here on requests are served by `engine`."""
        self._engine = engine
        self._prompts = PromptReader(engine.tokenizer, engine.max_model_len, self._workers)
        self._exposition = Exposition(engine, self.tally)
        engine.on_step.append(self.tally.step)
        engine.on_finished.append(self.tally.finish)
        engine.on_finished.append(self.timelines.note)
        engine.on_refused.append(self.tally.promises.refused)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    @property
    def engine(self) -> Engine:
        """The engine, dead or alive.

        Raises:
            ApiError: 503, there is none yet.
        """
        if self._engine is None:
            raise ApiError(503, "The model is still being loaded.", code="not_ready", retry_after=5)
        return self._engine

    @property
    def prompts(self) -> PromptReader:
        """Raises ApiError 503 where there is no engine yet."""
        _ = self.engine
        return self._prompts

    @property
    def exposition(self) -> Exposition:
        """Raises ApiError 503 where there is no engine yet."""
        _ = self.engine
        return self._exposition

    def live_engine(self) -> Engine:
        """The engine that new requests may go to.

        Raises:
            ApiError: 503, there is none yet, it has died, or the server is stopping.
        """
        engine = self.engine
        if engine.error is not None:
            raise ApiError(503, f"The engine has ended: {engine.error}", code="engine_dead")
        if self.stopping:
            raise ApiError(503, "The server is stopping.", code="not_ready", retry_after=5)
        return engine

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that is not the one served; null and an empty name mean that one."""
        served = self.engine.model_name
        if name and name != served:
            raise ApiError(
                404,
                f"The model {name!r} does not exist here; this server serves {served!r}.",
                param="model",
                code="model_not_found",
            )

    @property
    def max_sequences(self) -> int:
        """What the engine can hold, on board and waiting."""
        return self.engine.config.max_waiting + self.engine.capacity.max_num_seqs

    def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, terms: Terms, request_id: str, param: str
    ) -> list[Stream]:
        """One stream a prompt, all or none. `param` names the field that the prompts came in.

        Raises:
            RequestError, QueueFull, EngineDead: one was refused.
        """
        if len(prompts) * params.n > self.max_sequences:
            raise RequestError(
                f"{len(prompts)} prompts with n = {params.n} are more than the {self.max_sequences} sequences that "
                "this server holds at a time; send fewer.",
                param="n",
            )
        engine, promises = self.live_engine(), self.tally.promises
        terms = replace(terms, slo=terms.slo.over(self.settings.class_slo.get(terms.request_class, NO_SLO)))
        if self.settings.keys is not None:  # what one tenant calls its requests is nothing to the others
            request_id = f"{terms.tenant}/{request_id}"
        streams: list[Stream] = []
        quota = self.quotas.get(terms.tenant)
        prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if quota is not None:
            quota.pay(prompt_tokens)
        try:
            if self.settings.keys is not None and len(self.settings.keys.tenants) > 1:
                engine.check_share(terms.tenant, len(prompts) * params.n)
            for i, prompt in enumerate(prompts):
                stream = engine.generate(
                    prompt.token_ids,
                    params,
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
                    priority=terms.priority,
                    slo=terms.slo,
                    tenant=terms.tenant,
                    request_class=terms.request_class,
                    region=terms.region,
                    cache_salt=terms.cache_salt,
                    param=param,
                )
                streams.append(stream)
                promises.make(stream, terms.request_class, terms.tenant, terms.slo)
        except FAILURES:
            for stream in streams:
                stream.abort()
            longest = max(len(prompt.token_ids) for prompt in prompts)
            promises.miss(longest, terms.request_class, terms.tenant, terms.slo)
            if quota is not None:
                quota.give_back(prompt_tokens)
            raise
        if quota is not None:
            quota.follow(streams)
        return streams
