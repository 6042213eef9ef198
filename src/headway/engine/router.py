"""From prompts to requests, and from the engine's steps to the streams that wait for them."""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headway.core.batch import Finished, Logprobs
from headway.core.request import FinishReason, Request, RequestError, SamplingParams, Slo
from headway.engine.stop import StopStrings
from headway.engine.stream import Choice, EngineDead, GenerationError, Stream
from headway.engine.validation import Limits, check_request

if TYPE_CHECKING:
    from headway.engine.text import Tokenizer


NO_SLO = Slo()

log = logging.getLogger(__name__)


def _guarded(call: Callable[..., None], *args: object) -> None:
    """One reader's mistake must not keep the others from their tokens."""
    try:
        call(*args)
    except Exception:
        log.exception("a hook of the engine's streams failed")


@dataclass(frozen=True, slots=True)
class Tags:
    """Whose a request is and how urgent; the scheduler's business alone. Lower `priority` is earlier; only requests of
    the same `cache_salt` share computed beginnings of prompts."""

    priority: int = 0
    slo: Slo = NO_SLO
    tenant: str = ""
    request_class: str = ""
    region: str = ""
    cache_salt: str = ""


@dataclass(slots=True)
class StepTimes:
    """What one step brought its readers: tokens, gaps since each row's last token and times to first tokens, in s."""

    num_tokens: int
    gaps: list[float]
    first: list[float]


class Router:
    """Live choices by the handle that their tokens carry. Not thread-safe; knows neither processes nor tasks.

    `abort(handle, reason)` is how the engine is told to stop one. Hooks: `on_step` once per delivery that brought
    tokens; `on_finished` once per choice, when the engine has let go of it, with the engine's account of it;
    `on_refused` once per stream that the engine will not serve.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, abort: Callable[[int, FinishReason], None]) -> None:
        self.tokenizer = tokenizer
        self.limits = Limits(tokenizer.vocab_size, max_model_len)
        self.streams: dict[str, Stream] = {}
        self.on_step: list[Callable[[StepTimes], None]] = []
        self.on_finished: list[Callable[[Finished, Choice], None]] = []
        self.on_refused: list[Callable[[Stream], None]] = []
        self._eos = frozenset(tokenizer.eos_token_ids)
        self._choices: dict[int, Choice] = {}
        self._live_of: Counter[str] = Counter()
        self._handles = itertools.count(1)
        self._abort = abort

    @property
    def num_live(self) -> int:
        """Choices that the engine still holds."""
        return len(self._choices)

    def num_live_of(self, tenant: str) -> int:
        """Those of one tenant."""
        return self._live_of[tenant]

    def prepare(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        param: str = "prompt",
        add_special_tokens: bool = True,
    ) -> Stream:
        """A stream that nothing feeds yet. Checks everything that can be checked here.

        Raises:
            RequestError: see `check_request`; a request id that is being served.
        """
        if request_id is None:
            request_id = secrets.token_hex(12)
        elif request_id in self.streams:
            raise RequestError(f"request_id {request_id!r} is being served already", param="request_id")
        arrival = time.monotonic()
        if isinstance(prompt, str):
            text: str | None = prompt
            token_ids: Sequence[int] = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            text, token_ids = None, prompt
        params = check_request(token_ids, params, self.limits, param)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        return Stream(request_id, text, token_ids, params, arrival, self.abort)

    def open(self, stream: Stream, tags: Tags) -> list[Request]:
        """Makes the stream's choices live. Returns what the engine has to be given, one request a choice."""
        params = stream.params
        stop_token_ids = list(params.stop_token_ids)
        if not params.ignore_eos:
            stop_token_ids += [eos for eos in self.tokenizer.eos_token_ids if eos not in stop_token_ids]
        requests = []
        for index in range(params.n):
            choice = self._new_choice(stream, index)
            requests.append(
                Request(
                    stream.request_id if params.n == 1 else f"{stream.request_id}/{index}",
                    choice.handle,
                    stream.prompt_token_ids,
                    params,
                    stream.arrival,
                    stop_token_ids,
                    index,
                    tags.priority,
                    tags.slo,
                    tags.tenant,
                    tags.request_class,
                    tags.region,
                    tags.cache_salt,
                )
            )
        self.streams[stream.request_id] = stream
        stream.tenant = tags.tenant
        self._live_of[tags.tenant] += params.n
        return requests

    def _let_go(self, handle: int) -> Choice | None:
        """The engine holds this one no more. None: it is not known (any more)."""
        choice = self._choices.pop(handle, None)
        if choice is not None:
            tenant = choice.stream.tenant
            self._live_of[tenant] -= 1
            if not self._live_of[tenant]:
                del self._live_of[tenant]
        return choice

    def _new_choice(self, stream: Stream, index: int) -> Choice:
        params = stream.params
        detokenizer = self.tokenizer.detokenizer(
            stream.prompt_token_ids[-16:], skip_special_tokens=params.skip_special_tokens
        )
        stops = StopStrings(params.stop, params.include_stop_str_in_output) if params.stop else None
        choice = Choice(stream, index, next(self._handles), detokenizer, stops)
        stream.choices.append(choice)
        self._choices[choice.handle] = choice
        return choice

    def deliver(
        self,
        handles: Sequence[int],
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs | None] | None,
        finished: Sequence[Finished],
    ) -> None:
        """One step's tokens and endings, then one notification for each stream that has something new."""
        now = time.monotonic()
        get = self._choices.get
        times = StepTimes(0, [], [])
        ends = {end.handle: end.stop_token for end in finished} if finished else {}
        woken: list[Stream] = []
        for i, (handle, token_id) in enumerate(zip(handles, token_ids, strict=True)):
            choice = get(handle)
            if choice is None or choice.finish_reason is not None:
                continue
            if choice.token_ids:
                times.gaps.append(now - choice.last_token)
            else:
                choice.first_token = now
                times.first.append(now - choice.stream.arrival)
            choice.last_token = now
            logprob = None if logprobs is None else logprobs[i]
            if choice.push(token_id, logprob, ends.get(handle) == token_id):
                if choice.stream.queue(choice):
                    woken.append(choice.stream)
                if choice.finish_reason is not None:
                    self._abort(handle, FinishReason.STOP)
                    self._forget(choice, woken)
        for end in finished:
            self._finish(end, woken)
        for stream in woken:
            _guarded(stream.notify)
        times.num_tokens = len(times.gaps) + len(times.first)
        if times.num_tokens:
            for hook in self.on_step:
                _guarded(hook, times)

    def _finish(self, end: Finished, woken: list[Stream]) -> None:
        choice = self._let_go(end.handle)
        if choice is None:
            return
        choice.cached_tokens = end.cached_len
        if choice.finish_reason is None:
            asked = end.stop_token is not None and end.stop_token in choice.stream.params.stop_token_ids
            if end.reason is FinishReason.ERROR:
                self._fail(choice.stream, GenerationError(end.message or "the engine failed in this step"))
                woken.append(choice.stream)
            else:
                choice.finish(end.reason, end.stop_token if asked else None)
                choice.stream.queue(choice)
                self._forget(choice, woken)
        for hook in self.on_finished:
            _guarded(hook, end, choice)

    def _forget(self, choice: Choice, woken: list[Stream]) -> None:
        # The engine still holds the choice until it says so; the stream's id is free once the reader's part is over.
        if choice.stream.done:
            self.streams.pop(choice.stream.request_id, None)
            woken.append(choice.stream)

    def refuse(self, handle: int, error: RequestError) -> None:
        """The engine will not serve this one."""
        choice = self._let_go(handle)
        if choice is not None:
            if choice.stream.error is None:
                for hook in self.on_refused:
                    _guarded(hook, choice.stream)
            self._fail(choice.stream, error)
            choice.stream.notify()

    def abort(self, stream: Stream) -> None:
        """Ends what is left of the stream, here at once and in the engine within its depth of steps."""
        for choice in stream.choices:
            if choice.finish_reason is None:
                choice.finish(FinishReason.ABORT)
                stream.queue(choice)
                self._abort(choice.handle, FinishReason.ABORT)
        self.streams.pop(stream.request_id, None)
        stream.notify()

    def _fail(self, stream: Stream, error: Exception) -> None:
        stream.error = error
        for choice in stream.choices:
            if choice.finish_reason is None:
                choice.finish(FinishReason.ERROR)
                if choice.handle in self._choices:
                    self._abort(choice.handle, FinishReason.ABORT)
        self.streams.pop(stream.request_id, None)

    def fail_all(self, error: EngineDead) -> None:
        """The engine is gone: every reader gets what came before, then `error`."""
        streams = list(self.streams.values())
        self.streams.clear()
        self._choices.clear()
        self._live_of.clear()
        for stream in streams:
            stream.error = error
            stream.notify()
