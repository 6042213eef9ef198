"""openai-python against a running server. The model repeats its prompt, so every answer is known beforehand."""

from __future__ import annotations

from openai import OpenAI

from headway.engine.text import Tokenizer
from tests.server.conftest import MODEL
from tests.server.scripted import LOGPROB

PROMPT = "One two three four. "
MESSAGES = [{"role": "user", "content": "Hello there"}]


def repeated(words: Tokenizer, prompt: str, tokens: int, choice: int = 0) -> str:
    """What the scripted model answers."""
    ids = words.encode(prompt)
    return words.decode([ids[(len(ids) + i + choice) % len(ids)] for i in range(tokens)])


def chat_prompt(words: Tokenizer) -> str:
    return words.apply_chat_template(MESSAGES)


def test_completion(openai: OpenAI, words: Tokenizer) -> None:
    answer = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    assert answer.choices[0].text == repeated(words, PROMPT, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(words.encode(PROMPT))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_has_16_tokens_by_default_and_chat_goes_on_to_the_limit(openai: OpenAI) -> None:
    assert openai.completions.create(model=MODEL, prompt=PROMPT).usage.completion_tokens == 16
    chat = openai.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={"ignore_eos": True})
    assert chat.usage.total_tokens == openai.models.retrieve(MODEL).max_model_len


def test_completion_streamed_equals_whole(openai: OpenAI, words: Tokenizer) -> None:
    prompt = "naïve — 😀 \u2028 日本 "
    stream = openai.completions.create(model=MODEL, prompt=prompt, max_tokens=40, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == repeated(words, prompt, 40)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1


def test_chat(openai: OpenAI, words: Tokenizer) -> None:
    answer = openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=9)
    prompt = chat_prompt(words)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == repeated(words, prompt, 9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(words.encode(prompt))


def test_chat_streamed_with_usage(openai: OpenAI, words: Tokenizer) -> None:
    chunks = list(
        openai.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}
        )
    )
    first, *middle, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in middle)
    assert text == repeated(words, chat_prompt(words), 9)
    assert middle[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_model_ends_with_its_eos(openai: OpenAI) -> None:
    answer = openai.completions.create(model=MODEL, prompt="Hello world<|im_end|>", max_tokens=50)
    assert answer.choices[0].text == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3


def test_list_of_prompts_with_several_choices_each(openai: OpenAI, words: Tokenizer) -> None:
    prompts = ["First prompt, ", "The second one, "]
    answer = openai.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=6)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = [repeated(words, prompt, 6, choice) for prompt in prompts for choice in range(2)]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == sum(len(words.encode(prompt)) for prompt in prompts)
    assert answer.usage.completion_tokens == 24

    texts = dict.fromkeys(range(4), "")
    for chunk in openai.completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=6, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == expected


def test_prompts_of_token_ids(openai: OpenAI, words: Tokenizer) -> None:
    ids = words.encode(PROMPT)
    one = openai.completions.create(model=MODEL, prompt=ids, max_tokens=5)
    assert one.choices[0].text == repeated(words, PROMPT, 5)
    assert one.usage.prompt_tokens == len(ids)
    two = openai.completions.create(model=MODEL, prompt=[ids, ids[:2]], max_tokens=2)
    assert [choice.text for choice in two.choices] == [words.decode(ids[:2])] * 2


def test_n_choices_of_a_chat(openai: OpenAI, words: Tokenizer) -> None:
    expected = [repeated(words, chat_prompt(words), 7, choice) for choice in range(2)]
    answer = openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, max_tokens=7)
    assert [choice.message.content for choice in answer.choices] == expected
    chunks = list(openai.chat.completions.create(model=MODEL, messages=MESSAGES, n=2, max_tokens=7, stream=True))
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == expected[index]
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]


def test_stop_strings(openai: OpenAI) -> None:
    for stop in ("three", ["nothing", "three"], [" thr"]):
        answer = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, stop=stop)
        assert answer.choices[0].text.rstrip() == "One two"
        assert answer.choices[0].finish_reason == "stop"
    kept = openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, stop="three", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "One two three"
    assert kept.choices[0].stop_reason == "three"


def test_stop_string_streamed(openai: OpenAI) -> None:
    stream = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, stop=["three four."], stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "One two "
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_token_ids(openai: OpenAI, words: Tokenizer) -> None:
    third = words.encode(PROMPT)[2]
    answer = openai.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=30, extra_body={"stop_token_ids": [third]}
    )
    assert answer.choices[0].text == "One two"
    assert answer.choices[0].stop_reason == third


def test_logprobs_of_a_completion(openai: OpenAI, words: Tokenizer) -> None:
    answer = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=2)
    logprobs, text = answer.choices[0].logprobs, answer.choices[0].text
    ids = words.encode(PROMPT)
    expected = [words.token(ids[i % len(ids)]) for i in range(8)]
    assert logprobs.tokens == expected
    assert logprobs.token_logprobs == [LOGPROB] * 8
    assert all(text[at:].startswith(token) for at, token in zip(logprobs.text_offset, logprobs.tokens, strict=True))
    assert [best[token] for best, token in zip(logprobs.top_logprobs, expected, strict=True)] == [LOGPROB] * 8
    assert all(sorted(best.values()) == [2 * LOGPROB, LOGPROB] for best in logprobs.top_logprobs)


def test_logprobs_of_a_stream_belong_to_the_tokens_of_their_chunks(openai: OpenAI) -> None:
    whole = openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=0).choices[0].logprobs
    chunks = list(openai.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, logprobs=0, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in parts for token in part.tokens] == whole.tokens
    assert [offset for part in parts for offset in part.text_offset] == whole.text_offset
    assert all("".join(part.tokens) == chunk.choices[0].text for part, chunk in zip(parts, chunks, strict=True))


def test_logprobs_of_a_chat(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 8
    for entry in content:
        assert entry.logprob == LOGPROB
        assert bytes(entry.bytes).decode() == entry.token
        assert [best.logprob for best in entry.top_logprobs] == [LOGPROB, 2 * LOGPROB, 4 * LOGPROB]
        assert entry.top_logprobs[0].token == entry.token
    plain = openai.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, logprobs=True)
    assert [entry.top_logprobs for entry in plain.choices[0].logprobs.content] == [[], []]


def test_models(openai: OpenAI) -> None:
    assert [model.id for model in openai.models.list()] == [MODEL]
    assert openai.models.retrieve(MODEL).object == "model"
