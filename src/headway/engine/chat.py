"""Chat templates: a model's own rules for writing a conversation as one prompt, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headway.core.errors import ModelError
from headway.core.request import RequestError

_CUT = "\N{SYMBOL FOR END OF TRANSMISSION}continue here\N{SYMBOL FOR END OF TRANSMISSION}"


class ChatTemplate:
    """The templates that a model ships: `templates` name to source ("default", perhaps "tool_use").

    `special_tokens`: bos_token, eos_token ... as text, which templates may write.

    Raises:
        ModelError: a template that does not parse.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {name: environment.from_string(source) for name, source in templates.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is broken: line {error.lineno}: {error.message}") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        extra: Mapping[str, Any],
    ) -> str:
        """The prompt. `extra` are further variables for the template; see Tokenizer.apply_chat_template.

        Raises:
            RequestError: messages that are malformed or that the template refuses.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: set the latter to false",
                param="continue_final_message",
            )
        chat = [_plain(message, i) for i, message in enumerate(messages)]
        if not chat:
            raise RequestError("messages is empty: send at least one message", param="messages")
        if continue_final_message:
            chat[-1]["content"] += _CUT
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        own = {"messages": chat, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        try:
            text = template.render(self._special_tokens | dict(extra) | own)
        except Exception as error:  # a template is a program, and what it is given is the client's: anything may fail
            raise RequestError(f"the model's chat template refuses this request: {error}", param="messages") from error
        return _cut(text) if continue_final_message else text


def _cut(text: str) -> str:
    before, mark, _ = text.rpartition(_CUT)
    if not mark:
        raise RequestError(
            "the model's chat template does not show the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return before


def _plain(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """The message as templates expect it: content as text, the arguments of tool calls as objects."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role, got {message!r}", param="messages")
    plain = {**message, "content": _text(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call, where) for call in calls]
    return plain


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}.content must be a string or a list of parts, got {content!r}", param="messages")
    return "\n".join(_part_text(part, where) for part in content)


def _part_text(part: Any, where: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else part
        raise RequestError(
            f"{where}.content holds a part of type {kind!r}; this model reads text only", param="messages"
        )
    return text


def _plain_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.tool_calls must be objects with a function, got {call!r}", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise RequestError(
                f"{where}.tool_calls holds arguments that are not JSON: {arguments!r}", param="messages"
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}


class _GenerationBlock(Extension):
    """`{% generation %}` marks, for training, what the assistant said; to render it is to render what it holds."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for Hugging Face's transformers may use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja's own, leaves HTML's characters alone."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
