"""The synchronous engine: batched generation in this process, for scripts and notebooks."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headway.core.batch import Finished, Logprobs
from headway.core.request import FinishReason, RequestError, SamplingParams
from headway.engine.resolve import resolve_model
from headway.engine.router import Router, Tags
from headway.engine.startup import BUILD_LOOP, Model, Report, as_config, make_loop, silent
from headway.engine.stream import Stream
from headway.engine.text import Tokenizer

if TYPE_CHECKING:
    from headway.engine.loop import LoopStats

Message = Mapping[str, Any]
"""A chat message: role, content ..."""
LONGEST_SLEEP = 0.1
"""Seconds after which Ctrl-C is noticed at the latest."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `finish_reason` is "stop" or "length"; `stop_reason` the stop string or stop token id, if any."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprobs] | None
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt has become. `prompt` is None where token ids were given; `seed` is the one in effect."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int | None


class LLM:
    """A model in this process, with continuous batching over all prompts of a call.

    ::

        llm = LLM("smollm2")
        for completion in llm.generate(["Once upon", "In the end"], SamplingParams(max_tokens=32)):
            print(completion.outputs[0].text)

    `overrides` replace fields of the configuration or of its scheduler's. `report` gets start-up's lines for a person.
    Not thread-safe. On CPUs: a program that computes with torch on threads of its own, too, slows it down by half even
    when it does not do so at the same time, since OpenMP then lets all threads sleep between operations.

    Raises:
        ModelError: the model cannot be found, read or run.
    """

    def __init__(
        self,
        model: Model = None,
        *,
        report: Report = silent,
        loop_factory: str = BUILD_LOOP,
        **overrides: Any,
    ) -> None:
        self.config = as_config(model, overrides)
        path = str(resolve_model(self.config.model))
        self.tokenizer = Tokenizer.load(path)
        self._loop = make_loop(loop_factory, self.config, path, report)
        self._ended: list[Finished] = []  # by aborts, still to be delivered
        self._router = Router(self.tokenizer, self._loop.executor.capacity().max_model_len, self._abort)

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self._router.limits.max_model_len

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Completes each prompt (a text or token ids); results come in the prompts' order.

        `params`: one for all or one for each. `use_tqdm` (vLLM's name) shows a progress bar. Ctrl-C ends all of them
        after the step under way; the engine stays usable.

        Raises:
            RequestError: one of them cannot be served as asked; none is.
            GenerationError: the engine could not go on with one of them.
        """
        return self._complete(_as_list(prompts), params, use_tqdm, "prompt", add_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[Completion]:
        """Answers one conversation or several; `template` goes to `Tokenizer.apply_chat_template`."""
        conversations: Any = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.tokenizer.apply_chat_template(conversation, **template) for conversation in conversations]
        return self._complete(prompts, params, use_tqdm, "messages", add_special_tokens=False)

    def _complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        param: str,
        add_special_tokens: bool,
    ) -> list[Completion]:
        each = _one_for_each(params, len(prompts))
        streams = [
            self._router.prepare(prompt, p, param=param, add_special_tokens=add_special_tokens)
            for prompt, p in zip(prompts, each, strict=True)
        ]
        try:
            with _interrupts_wait() as interrupted, _progress(use_tqdm, len(streams)) as advance:
                for stream in streams:
                    self._add(stream)
                self._loop.no_more()
                self._run(streams, interrupted, advance)
        finally:
            self._drain(streams)
        return [_completion(stream) for stream in streams]

    def _add(self, stream: Stream) -> None:
        requests = self._router.open(stream, Tags())
        try:
            for request in requests:
                self._loop.add(request)
        except RequestError as error:
            for request in requests:
                self._router.refuse(request.handle, error)
            raise

    def _run(self, streams: list[Stream], interrupted: Callable[[], bool], advance: Callable[[int, int], None]) -> None:
        live, num_tokens = self._router.streams, 0
        while live:
            before = len(live)
            num_tokens += self._step()
            if len(live) < before:
                for stream in streams:
                    if stream.error is not None:
                        raise stream.error
            if interrupted():
                raise KeyboardInterrupt
            advance(len(streams) - len(live), num_tokens)

    def _step(self) -> int:
        """One step and its tokens; returns how many came."""
        events = self._loop.step()
        ended, self._ended = self._ended, []
        if events is None:
            self._router.deliver((), (), None, ended)
            if not ended:
                self._sleep()
            return 0
        self._router.deliver(
            events.handles.tolist(), events.token_ids.tolist(), events.logprobs, events.finished + ended
        )
        return len(events.handles)

    def _sleep(self) -> None:
        """Nothing to compute yet: until the loop wants to be asked again, or for a moment."""
        wait = self._loop.wait_until - self._loop.clock()
        if wait == math.inf and not self._loop.idle:
            raise RuntimeError("the scheduler waits for an event, and none can come: this is a defect in headway")
        time.sleep(min(max(0.0, wait), LONGEST_SLEEP))

    def _drain(self, streams: list[Stream]) -> None:
        """Ends what still runs, if anything does, and collects what is launched: then all blocks are free."""
        for stream in streams:
            stream.abort()
        while not self._loop.idle or self._ended:
            self._step()

    def _abort(self, handle: int, reason: FinishReason) -> None:
        events = self._loop.abort(handle, reason)
        if events is not None:
            self._ended += events.finished

    def stats(self) -> LoopStats:
        """How things stand: steps, preemptions, efficiency ..."""
        return self._loop.stats()

    def close(self) -> None:
        """Frees the model's memory."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _as_list(prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | Sequence[int]]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{count} prompts need as many params (or one for all), got {len(params)}")
    return list(params)


def _completion(stream: Stream) -> Completion:
    outputs = [
        CompletionOutput(
            delta.index,
            delta.text,
            delta.token_ids,
            delta.logprobs,
            delta.finish_reason or "",
            delta.stop_reason,
        )
        for delta in sorted(stream.take(), key=lambda delta: delta.index)
    ]
    return Completion(stream.prompt, list(stream.prompt_token_ids), outputs, stream.seed)


@contextmanager
def _interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noticed between two steps: in the middle of one it would leave the scheduler and the device at odds.

    A second one does not wait. Only the main thread gets signals; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = signal.getsignal(signal.SIGINT)
    seen = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        seen.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, handle)
    try:
        yield seen.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _progress(shown: bool, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error; it is told how many prompts are done and how many tokens have come."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("Generating", total=total, speed=0.0)

        def advance(done: int, num_tokens: int) -> None:
            speed = num_tokens / max(1e-9, time.monotonic() - start)
            progress.update(task, completed=done, speed=speed)

        yield advance
