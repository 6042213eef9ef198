"""Chat templates against transformers' rendering of them; hostile ones get nowhere."""

from __future__ import annotations

import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from headway.core.request import RequestError
from headway.engine.chat import ChatTemplate
from headway.models import ModelError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA_LIKE = """{{ bos_token }}
{%- if tools %}
    {{- "Tools: " + (tools | tojson(indent=2)) + "\\n" }}
{%- endif %}
{%- for message in messages if message['role'] != 'system' %}
    {%- if message.role not in ['user', 'assistant', 'tool'] %}
        {{- raise_exception('role ' + message.role + ' is unknown') }}
    {%- endif %}
    {%- if loop.index > 40 %}{% break %}{% endif %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name + '(' + call.function.arguments.city | tojson + ')' }}
    {%- endfor %}
    {%- generation %}{{- eos_token }}{%- endgeneration %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"""
CHAT = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Is 1 < 2 & 'x' > \"y\"?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Ünïcödé 🙂"},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "für <b>Städte</b>", "parameters": {}}}]


def render(source, messages, *, tools=None, add_generation_prompt=True, continue_final_message=False, **extra):
    return ChatTemplate({"default": source}, SPECIAL).render(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        extra=extra,
    )


def reference(source, messages, **options):
    (text,), _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": False}])
def test_templates_render_as_in_transformers(prompt, tools, extra):
    options = {"add_generation_prompt": prompt, "tools": tools, **extra}
    assert render(LLAMA_LIKE, CHAT, **options) == reference(LLAMA_LIKE, CHAT, **options)


def test_the_embedded_template(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("content", ["The answer", "The answer is ", "a\n"])
def test_a_final_message_that_is_to_be_continued(tokenizer, content):
    chat = [*CHAT, {"role": "assistant", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=False, continue_final_message=True)
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\n" + content)
    assert whole == text + "<|im_end|>\n"


def test_content_in_parts_and_none():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    source = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert render(source, chat) == "[one\ntwo][][]"


def test_the_arguments_of_tool_calls_are_objects():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    chat = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '<|assistant|>weather("Köln")' in render(LLAMA_LIKE, chat)
    assert chat[-1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'


def test_a_template_for_tools_is_taken_where_there_is_one():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    options = {"add_generation_prompt": True, "continue_final_message": False, "extra": {}}
    assert template.render(CHAT, tools=None, **options) == "plain"
    assert template.render(CHAT, tools=TOOLS, **options) == "tools"


def test_the_date_and_namespaces():
    source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    assert render(source + "{{ strftime_now('%Y') }}", CHAT) == f"4{datetime.datetime.now().year}"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        (["hi"], r"messages\[0\] must be an object with a role"),
        ([{"content": "hi"}], r"messages\[0\] must be an object with a role"),
        ([{"role": "user", "content": 7}], r"messages\[0\]\.content must be a string or a list"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "part of type 'image_url'; this model reads text only",
        ),
        ([{"role": "ghost", "content": "boo"}], "role ghost is unknown"),
        ([{"role": "assistant", "tool_calls": [7]}], r"tool_calls must be objects"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}], "template refuses"),
    ],
)
def test_bad_messages_are_bad_requests(messages, message):
    with pytest.raises(RequestError, match=message) as caught:
        render(LLAMA_LIKE, messages)
    assert caught.value.param == "messages"


def test_continuing_and_prompting_exclude_each_other(tokenizer):
    with pytest.raises(RequestError, match="exclude each other"):
        tokenizer.apply_chat_template(CHAT, continue_final_message=True)
    with pytest.raises(RequestError, match="does not show the final message"):
        render("nothing", CHAT, add_generation_prompt=False, continue_final_message=True)


def test_a_client_cannot_replace_what_the_template_is_given(tokenizer):
    assert tokenizer.apply_chat_template(CHAT, messages=[]) == tokenizer.apply_chat_template(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(RequestError, match="template refuses"):
        render(source, CHAT)


def test_a_broken_template_is_the_models_fault():
    with pytest.raises(ModelError, match="chat template is broken: line 2"):
        ChatTemplate({"default": "\n{% if %}"}, {})
